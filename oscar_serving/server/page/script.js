"use strict";
const info = JSON.parse(document.getElementById("info").textContent);
const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat();

// Gauges: the server's Prometheus text, once a second.
let last = null;

function samples(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const match = /^([^#{\s]+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const tier = /tier="([^"]*)"/.exec(match[2] || "");
    values[match[1] + (tier ? " " + tier[1] : "")] = Number(match[3]);
  }
  return values;
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(bytes) >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${bytes.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

function show(now, values) {
  for (const row of document.querySelectorAll(".tier")) {
    const tier = row.dataset.tier;
    const total = values[`oscar_pages ${tier}`], used = values[`oscar_pages_in_use ${tier}`];
    const cached = values[`oscar_pages_cached ${tier}`];
    const share = (pages) => (total ? (100 * pages) / total : 0);
    row.querySelector(".used").style.width = `${share(used)}%`;
    row.querySelector(".cached").style.width = `${share(cached)}%`;
    const text = `${whole.format(used)} in use, ${whole.format(cached)} cached of ${whole.format(total)} pages`;
    row.querySelector(".numbers").textContent = text;
    row.querySelector(".bar").setAttribute("aria-label", text);
  }
  const generated = values["vllm:generation_tokens_total"];
  if (last) byId("rate").textContent = ((generated - last.generated) / ((now - last.now) / 1000)).toFixed(1);
  last = { now, generated };
  byId("running").textContent = whole.format(values["vllm:num_requests_running"]);
  byId("waiting").textContent = whole.format(values["vllm:num_requests_waiting"]);
  byId("generated").textContent = whole.format(generated);
  const asked = values["vllm:prefix_cache_queries_total"], hits = values["vllm:prefix_cache_hits_total"];
  byId("hits").textContent = asked ? `${Math.round((100 * hits) / asked)} %` : "–";
  byId("saved").textContent = size(values.oscar_saved_bytes);
}

async function refresh() {
  let trouble = "";
  try {
    const response = await fetch("metrics");
    if (!response.ok) throw new Error(`status ${response.status}`);
    show(performance.now(), samples(await response.text()));
  } catch (error) {
    trouble = `The server does not answer (${error.message}).`;
    last = null;
  }
  byId("trouble").textContent = trouble;
  byId("trouble").hidden = !trouble;
  setTimeout(refresh, 1000);
}

// Chat: the server's own streaming API.
let messages = [];
let running = null;

function say(who, text) {
  const line = document.createElement("p");
  const name = document.createElement("b");
  name.textContent = who;
  line.append(name, document.createTextNode(text));
  byId("log").append(line);
  byId("log").scrollTop = byId("log").scrollHeight;
  return line.lastChild;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice(6));
    }
  }
}

async function answer() {
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  const line = say(info.model, "");
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ model: info.model, messages, stream: true }),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      line.data += event.choices[0].delta.content || "";
      byId("log").scrollTop = byId("log").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      line.parentNode.classList.add("error");
      line.data += `\n${error.message}`;
    }
  }
  if (line.data) messages.push({ role: "assistant", content: line.data });
  running = null;
  byId("send").disabled = false;
  byId("stop").disabled = true;
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (!text || running) return;
  byId("text").value = "";
  messages.push({ role: "user", content: text });
  say("You", text);
  answer();
});
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
byId("stop").addEventListener("click", () => running && running.abort());
byId("clear").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  byId("log").replaceChildren();
  byId("text").focus();
});
refresh();
