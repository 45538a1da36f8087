"""`pagedserve chat`: a terminal client for any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx

from pagedserve import envs
from pagedserve.errors import ConfigError, PagedServeError

HELP = "/reset forgets the conversation, /system TEXT sets the system prompt, /stats toggles timings, /quit leaves."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    parser.add_argument("--model", help="model to ask for (default: the first that is served)")
    parser.add_argument("--api-key", help="key to send (default: PAGEDSERVE_API_KEY)")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask once, print the answer and leave")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer (default: 512)")
    parser.add_argument("--temperature", type=float, help="sampling temperature (default: the server's)")
    parser.add_argument("--stats", action="store_true", help="print time to first token and tokens/s")


def run(args: argparse.Namespace) -> int:
    key = args.api_key or next(iter(envs.api_keys()), None)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    base = args.url.rstrip("/").removesuffix("/v1") + "/v1"
    with httpx.Client(headers=headers, timeout=httpx.Timeout(600.0, connect=5.0)) as client:
        try:
            conversation = Conversation(client, base, args)
            if args.quick is not None:
                conversation.say(args.quick)
                return 0
            return _interact(conversation)
        except httpx.ConnectError as error:
            raise ConfigError(f"no server answers at {args.url} ({error}); start one or pass --url") from error
        except httpx.HTTPError as error:
            raise PagedServeError(f"the connection to {args.url} broke: {error}") from error


class Conversation:
    """The messages so far, and how to send them."""

    def __init__(self, client: httpx.Client, base: str, args: argparse.Namespace):
        self._client = client
        self._base = base
        self.model = args.model or self._first_model()
        self.show_stats = args.stats
        self._options = {"max_tokens": args.max_tokens}
        if args.temperature is not None:
            self._options["temperature"] = args.temperature
        self.messages: list[dict[str, str]] = []
        if args.system:
            self.set_system(args.system)

    def set_system(self, text: str) -> None:
        """Start again with this system prompt."""
        self.messages = [{"role": "system", "content": text}]

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self.messages = [m for m in self.messages if m["role"] == "system"]

    def say(self, text: str) -> None:
        """Send one user message and print the answer as it comes; a failed turn leaves no trace."""
        self.messages.append({"role": "user", "content": text})
        started = time.perf_counter()
        first: float | None = None
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        try:
            for chunk in self._stream():
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    piece = choice["delta"].get("content")
                    if piece:
                        first = first or time.perf_counter()
                        pieces.append(piece)
                        print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except BaseException:
            self.messages.pop()
            raise
        print()
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        if self.show_stats and first is not None and usage:
            _print_stats(usage, first - started, time.perf_counter() - first)

    def _stream(self) -> Iterator[dict[str, Any]]:
        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        with self._client.stream("POST", f"{self._base}/chat/completions", json=body) as response:
            _raise_for(response)
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[len("data: ") :])
                if "error" in chunk:
                    raise PagedServeError(chunk["error"]["message"])
                yield chunk

    def _first_model(self) -> str:
        response = self._client.get(f"{self._base}/models")
        _raise_for(response)
        models = response.json().get("data") or []
        if not models:
            raise ConfigError("the server lists no model; pass --model")
        return models[0]["id"]


def _interact(conversation: Conversation) -> int:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing and history for input())

        print(f"Talking with {conversation.model}. {HELP}")
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()
            return 0
        command, _, rest = text.partition(" ")
        if command in ("/quit", "/exit"):
            return 0
        if command == "/reset":
            conversation.reset()
        elif command == "/system":
            conversation.set_system(rest)
        elif command == "/stats":
            conversation.show_stats = not conversation.show_stats
        elif command.startswith("/"):
            print(HELP)
        elif text:
            try:
                conversation.say(text)
            except PagedServeError as error:
                print(f"error: {error}", file=sys.stderr)


def _raise_for(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    raise PagedServeError(f"HTTP {response.status_code}: {message}")


def _print_stats(usage: dict[str, Any], ttft: float, decode_seconds: float) -> None:
    tokens = usage["completion_tokens"]
    rate = f", {(tokens - 1) / decode_seconds:.1f} tokens/s" if tokens > 1 and decode_seconds > 0 else ""
    print(f"[{usage['prompt_tokens']} in, {tokens} out, first token after {ttft:.2f} s{rate}]")
