"""Files: stored, listed and deleted as the `openai` package expects, bounded, and never outside their folder."""

from __future__ import annotations

import io

import httpx
import openai
import pytest

from pagedserve.api.batch.store import BatchStore
from pagedserve.api.routes import files as routes
from pagedserve.errors import ConfigError, NotFoundError
from tests.api.conftest import Front, FrontFactory
from tests.helpers.streams import check_error

CONTENT = b'{"custom_id": "a"}\n'


@pytest.fixture
def client(front: Front) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.base_url}/v1", api_key="none", max_retries=0)


def upload(front: Front, content: bytes = CONTENT, **fields: str) -> httpx.Response:
    return front.client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch", **fields})


def test_the_life_of_a_file(client: openai.OpenAI) -> None:
    content = CONTENT * 100_000  # larger than what is kept in memory while it is read
    file = client.files.create(file=("../../etc/pässwd", content), purpose="batch")
    assert (file.object, file.bytes, file.purpose, file.status) == ("file", len(content), "batch", "processed")
    assert file.filename == "../../etc/pässwd"
    assert file.expires_at == file.created_at + 30 * 86_400
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    assert client.files.delete(file.id).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(file.id)


def test_pages_of_files(client: openai.OpenAI) -> None:
    made = [client.files.create(file=(f"{i}", CONTENT), purpose="batch").id for i in range(5)]
    newest = client.files.list(limit=2)
    assert [file.id for file in newest.data] == made[:-3:-1]
    assert newest.has_more
    assert [file.id for file in client.files.list(limit=2)][:5] == made[::-1]
    oldest = client.files.list(order="asc", after=made[2])
    assert [file.id for file in oldest.data] == made[3:]
    assert not oldest.has_more
    assert client.files.list(purpose="batch_output").data == []


def test_a_file_says_when_it_expires(front: Front) -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = upload(front, **fields).json()
    assert file["expires_at"] == file["created_at"] + 3600


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "assistants"}, "purpose"),
        ({"purpose": ""}, "purpose"),
        ({"expires_after[seconds]": "3600"}, "expires_after"),
        ({"expires_after[anchor]": "created_at"}, "expires_after"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}, "expires_after"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after"),
    ],
    ids=str,
)
def test_fields_that_are_wrong_are_named(front: Front, fields: dict[str, str], param: str) -> None:
    check_error(upload(front, **fields), 400, param=param)


def test_what_is_no_form_with_a_file(front: Front) -> None:
    post = front.client.post
    check_error(post("/v1/files", json={"purpose": "batch"}), 415)
    check_error(post("/v1/files", data={"purpose": "batch", "file": "x"}), 415)
    check_error(post("/v1/files", files={"purpose": (None, "batch")}), 400, param="file")
    check_error(post("/v1/files", files={"purpose": (None, "batch"), "file": (None, "x")}), 400, param="file")
    check_error(post("/v1/files", content=b"x", headers={"Content-Type": "multipart/form-data"}), 400)
    broken = {"Content-Type": "multipart/form-data; boundary=x"}
    check_error(post("/v1/files", content=b"--y\r\n", headers=broken), 400)
    two = [("file", ("a", CONTENT)), ("file", ("b", CONTENT)), ("purpose", (None, "batch"))]
    check_error(post("/v1/files", files=two), 400)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=99999999999999", "order=up", "after=file-nope"])
def test_pages_that_do_not_exist(front: Front, query: str) -> None:
    check_error(front.client.get(f"/v1/files?{query}"), 400, param=query.partition("=")[0])


@pytest.mark.parametrize("name", ["nope", "..%2f..%2fstate.sqlite3", "%2e%2e", "file-"])
def test_nothing_but_stored_files_is_opened(front: Front, name: str) -> None:
    upload(front)
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content"):
        assert front.client.get(path).status_code == 404


def test_large_files_and_full_folders(make_front: FrontFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    front = make_front(data_dir_quota="1kB")
    assert upload(front, b"x" * 600).status_code == 200
    error = check_error(upload(front, b"x" * 600), 413)
    assert "--data-dir-quota" in error["message"]
    monkeypatch.setattr(routes, "MAX_FILE_BYTES", 100)
    check_error(upload(front, b"x" * 600), 413)
    assert len(front.client.get("/v1/files").json()["data"]) == 1


def test_files_end_at_their_time(tmp_path) -> None:
    now = 1000.0
    store = BatchStore(tmp_path, quota_bytes=1000, clock=lambda: now)
    file = store.add_file(io.BytesIO(b"x"), filename="f", purpose="batch", seconds=10)
    kept = store.add_file(io.BytesIO(b"y"), filename="g", purpose="batch", seconds=None)
    path = store.path(file.id)
    now = 1010.0
    with pytest.raises(NotFoundError):
        store.file(file.id)
    assert store.files(purpose=None, after=None, limit=10, ascending=True) == [kept]
    assert not path.exists()
    store.close()


def test_one_server_a_folder(tmp_path) -> None:
    store = BatchStore(tmp_path, quota_bytes=1000)
    with pytest.raises(ConfigError, match="in use by another server"):
        BatchStore(tmp_path, quota_bytes=1000)
    store.close()
    BatchStore(tmp_path, quota_bytes=1000).close()
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    with pytest.raises(ConfigError, match="--data-dir"):
        BatchStore(blocked / "x", quota_bytes=1000)
