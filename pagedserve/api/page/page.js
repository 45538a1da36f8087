// Chat with the served model, and what the engine is doing meanwhile. Talks to this server only; everything that a
// model or a server says is shown as text, never as markup.

const byId = (id) => document.getElementById(id);
const conversation = byId("conversation");
const question = byId("question");

let messages = [];
let running = null; // AbortController of the answer that is being streamed

const keyHeader = () => (byId("key").value ? { Authorization: `Bearer ${byId("key").value}` } : {});

function showProblem(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

async function why(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status} ${response.statusText}`;
  }
}

function element(kind, className, text = "") {
  const made = document.createElement(kind);
  made.className = className;
  made.textContent = text;
  return made;
}

function isAtEnd() {
  return conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 40;
}

function show(role, text = "") {
  byId("hint")?.remove();
  const box = element("div", `message ${role}`);
  const reasoning = element("details", "reasoning");
  reasoning.append(element("summary", "", "Reasoning"), element("div", ""));
  reasoning.hidden = true;
  const content = element("div", "content", text);
  const facts = element("div", "facts");
  box.append(reasoning, content, facts);
  conversation.append(box);
  box.scrollIntoView({ block: "end" });
  return { box, content, facts, reasoning };
}

// Yields the JSON of each `data:` line of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function requestBody() {
  const system = byId("system").value.trim();
  const body = {
    model: byId("model").value,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (byId("temperature").value !== "") body.temperature = Number(byId("temperature").value);
  if (byId("max-tokens").value !== "") body.max_completion_tokens = Number(byId("max-tokens").value);
  return body;
}

function setBusy(busy) {
  byId("send").disabled = busy;
  byId("stop").hidden = !busy;
}

async function answer(asked) {
  // "New chat" starts another list while this one may still be running.
  const chat = messages;
  const mine = show("user", asked);
  const shown = show("assistant");
  const started = performance.now();
  let first = null;
  let text = "";
  let usage = null;
  let ending = "";
  running = new AbortController();
  setBusy(true);
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...keyHeader() },
      body: JSON.stringify(requestBody()),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await why(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      const stay = isAtEnd();
      const thought = choice.delta.reasoning ?? choice.delta.reasoning_content;
      if (thought) {
        shown.reasoning.hidden = false;
        shown.reasoning.lastChild.textContent += thought;
      }
      if (choice.delta.content) {
        text += choice.delta.content;
        shown.content.textContent = text;
      }
      if (thought || choice.delta.content) first ??= performance.now();
      if (choice.finish_reason === "length") ending = ", cut at its longest";
      if (stay) conversation.scrollTop = conversation.scrollHeight;
    }
  } catch (error) {
    if (error.name === "AbortError") ending = ", stopped";
    else showProblem(error.message);
  } finally {
    running = null;
    setBusy(false);
  }
  if (!first) {
    // Nothing came: as if it had not been asked.
    chat.pop();
    for (const box of [mine.box, shown.box]) box.remove();
    question.value ||= chat === messages ? asked : "";
    return;
  }
  chat.push({ role: "assistant", content: text });
  const seconds = (performance.now() - first) / 1000;
  const count = usage ? `${usage.completion_tokens} tokens, ` : "";
  const rate = usage && seconds > 0 ? `, ${(usage.completion_tokens / seconds).toFixed(1)} tokens/s` : "";
  shown.facts.textContent = `${count}first after ${((first - started) / 1000).toFixed(2)} s${rate}${ending}`;
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (!text || running) return;
  showProblem("");
  messages.push({ role: "user", content: text });
  question.value = "";
  answer(text);
});

question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});

byId("stop").addEventListener("click", () => running?.abort());

byId("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  conversation.replaceChildren();
  showProblem("");
  question.focus();
});

// -- the engine's state, from the same metrics that Prometheus reads --------------------------------------------------

function total(text, name) {
  let sum = 0;
  for (const line of text.split("\n")) {
    if (line.startsWith(`${name}{`) || line.startsWith(`${name} `)) sum += Number(line.slice(line.lastIndexOf(" ") + 1));
  }
  return sum;
}

let last = null; // { time, tokens }

async function showState() {
  try {
    const response = await fetch("metrics", { headers: keyHeader() });
    if (!response.ok) throw new Error(await why(response));
    const text = await response.text();
    const now = { time: performance.now(), tokens: total(text, "vllm:generation_tokens_total") };
    const usage = total(text, "vllm:kv_cache_usage_perc");
    byId("running").textContent = total(text, "vllm:num_requests_running");
    byId("waiting").textContent = total(text, "vllm:num_requests_waiting");
    byId("kv").textContent = `${(100 * usage).toFixed(1)} %`;
    byId("kv-meter").value = usage;
    if (last) byId("rate").textContent = ((1000 * (now.tokens - last.tokens)) / (now.time - last.time)).toFixed(1);
    last = now;
  } catch {
    for (const id of ["running", "waiting", "kv", "rate"]) byId(id).textContent = "–";
    last = null;
  }
}

async function showModels() {
  try {
    const response = await fetch("v1/models", { headers: keyHeader() });
    if (!response.ok) throw new Error(await why(response));
    const names = (await response.json()).data.map((model) => model.id);
    byId("model").replaceChildren(...names.map((name) => new Option(name, name)));
    showProblem("");
  } catch (error) {
    showProblem(error.message);
  }
}

byId("key").addEventListener("change", () => {
  showModels();
  showState();
});

showModels();
showState();
setInterval(() => document.hidden || showState(), 1000);
