// The playground: a chat that colors each token by how it was produced, and a race with and without drafts.

const EXAMPLES = [
  "Explain how rainbows form, in five sentences.",
  "Write a Python function that reverses a string.",
  "A shop sells pens at 3 dollars each. How much are 14 pens? Think step by step.",
];
const KEPT = "peagle.chat";

const element = (id) => document.getElementById(id);
const state = { messages: [], key: sessionStorage.getItem("peagle.key") || "", stop: null, tab: "chat", served: null };

// Talking to the server ------------------------------------------------------------------------------------------------

function headers() {
  const base = { "Content-Type": "application/json" };
  return state.key ? { ...base, Authorization: `Bearer ${state.key}` } : base;
}

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function refusal(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not our error format, perhaps from a proxy
  }
  return new Refused(response.status, message);
}

/** The parsed chunks of a streamed answer. */
async function* chunks(body, signal) {
  const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) throw new Refused(0, "the connection ended in the middle of the answer");
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(chunk.error.code, chunk.error.message);
      yield chunk;
    }
  }
}

/** Stream one answer and call `onTokens(tokens, step)` as it grows. Returns its text and its figures. */
async function answer(messages, numDrafts, signal, onTokens) {
  const speculation = { details: true, enabled: numDrafts > 0 };
  if (numDrafts > 0) speculation.num_draft_tokens = numDrafts;
  const body = {
    model: state.served.id,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number(element("temperature").value),
    max_tokens: Number(element("length").value),
    speculation,
  };
  const result = { text: "", tokens: [], steps: [], finish: null, usage: null, metrics: null, first: null, seconds: 0 };
  const started = performance.now();
  for await (const chunk of chunks(body, signal)) {
    const choice = chunk.choices[0];
    const content = choice?.delta?.content || "";
    const step = chunk.speculation;
    if (content || step) {
      result.first ??= performance.now() - started;
      const tokens = step?.tokens?.length ? step.tokens : [{ text: content, kind: "plain" }];
      result.text += content;
      result.tokens.push(...tokens);
      if (step?.num_drafted) result.steps.push(step);
      result.seconds = (performance.now() - started) / 1000;
      onTokens(tokens, result);
    }
    if (choice?.finish_reason) result.finish = choice.finish_reason;
    if (chunk.usage) result.usage = chunk.usage;
    if (chunk.metrics) result.metrics = chunk.metrics;
  }
  return result;
}

function speed(result) {
  const seconds = result.seconds - (result.first || 0) / 1000;
  return seconds > 0 && result.tokens.length > 1 ? (result.tokens.length - 1) / seconds : null;
}

// Showing --------------------------------------------------------------------------------------------------------------

function show(id, value, digits = 0) {
  element(id).textContent = value === null || value === undefined ? "-" : value.toFixed(digits);
}

function appendTokens(place, tokens) {
  for (const { text, kind } of tokens) {
    if (!text) continue;
    const span = document.createElement("span");
    span.className = `token ${kind}`;
    span.title = kind;
    span.textContent = text;
    place.append(span);
  }
}

function showFigures(result) {
  const drafted = result.steps.length;
  const accepted = result.steps.reduce((sum, step) => sum + step.num_accepted, 0);
  show("figure-speed", speed(result), 1);
  show("figure-length", drafted ? 1 + accepted / drafted : null, 2);
  show("figure-first", result.first);
  show("figure-tokens", result.tokens.length);
  showDepths(result.steps);
}

function showDepths(steps) {
  const place = element("depths");
  const deepest = Math.max(0, ...steps.map((step) => step.num_drafted));
  const shares = [...Array(deepest).keys()].map((depth) => {
    const asked = steps.filter((step) => step.num_drafted > depth);
    return asked.filter((step) => step.num_accepted > depth).length / asked.length;
  });
  place.replaceChildren(
    ...shares.map((share, depth) => {
      const column = document.createElement("div");
      column.className = "depth";
      const bar = document.createElement("i");
      bar.style.height = `${Math.round(70 * share)}%`;
      column.append(`${Math.round(100 * share)}%`, bar, `${depth + 1}`);
      return column;
    }),
  );
  const words = shares.map((share, depth) => `depth ${depth + 1}: ${Math.round(100 * share)} percent`);
  place.setAttribute("aria-label", words.length ? words.join(", ") : "no drafts yet");
}

function notice(message) {
  element("notice").textContent = message || "";
  element("notice").hidden = !message;
}

function complain(error) {
  if (error.name === "AbortError") return;
  if (error.status === 401) element("key-form").hidden = false;
  notice(error.status === 401 ? "" : error.message);
}

function busy(stop) {
  state.stop = stop;
  element("send").disabled = Boolean(stop);
  element("stop").hidden = !stop;
}

// Chat -----------------------------------------------------------------------------------------------------------------

function showMessage(message) {
  const item = document.createElement("li");
  item.className = `message ${message.role}`;
  if (message.tokens) appendTokens(item, message.tokens);
  else item.textContent = message.content;
  element("messages").append(item);
  return item;
}

function showEnd(item, words) {
  const end = document.createElement("span");
  end.className = "end";
  end.textContent = words;
  item.append(end);
}

function showChat() {
  element("messages").replaceChildren();
  for (const message of state.messages) {
    const item = showMessage(message);
    if (message.end) showEnd(item, message.end);
  }
  element("chat-empty").hidden = state.messages.length > 0;
}

function keep() {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(state.messages));
  } catch {
    // a chat too long to store is lost on a reload
  }
}

function follow(panel) {
  const isAtEnd = panel.scrollHeight - panel.scrollTop - panel.clientHeight < 80;
  return () => isAtEnd && panel.scrollTo({ top: panel.scrollHeight });
}

async function chat(question) {
  notice("");
  state.messages.push({ role: "user", content: question });
  const asked = state.messages.filter((message) => message.content).map(({ role, content }) => ({ role, content }));
  const message = { role: "assistant", content: "", tokens: [] };
  state.messages.push(message);
  showChat();
  message.end = "cut off by a reload"; // shown only if the page reloads before the answer ends
  keep();
  const item = element("messages").lastElementChild;
  const stop = new AbortController();
  busy(stop);
  try {
    const result = await answer(asked, Number(element("drafts").value), stop.signal, (tokens, soFar) => {
      const scroll = follow(element("panel-chat"));
      message.content = soFar.text;
      message.tokens.push(...tokens);
      appendTokens(item, tokens);
      showFigures(soFar);
      scroll();
      keep();
    });
    message.end = result.finish === "length" ? "reached the maximum length" : "";
  } catch (error) {
    message.end = error.name === "AbortError" ? "stopped" : `failed: ${error.message}`;
    complain(error);
  }
  if (message.end) showEnd(item, message.end);
  busy(null);
  keep();
}

// Race -----------------------------------------------------------------------------------------------------------------

async function race(question) {
  notice("");
  const lanes = [
    { name: "plain", drafts: 0 },
    { name: "drafts", drafts: Number(element("drafts").value) || state.served.peagle?.num_draft_tokens || 0 },
  ];
  for (const { name } of lanes) {
    element(`answer-${name}`).replaceChildren();
    show(`speed-${name}`, null);
    element(`answer-${name}`).parentElement.classList.remove("winner");
  }
  tell("Racing.", false);
  const stop = new AbortController();
  busy(stop);
  try {
    for (const lane of lanes) {
      const place = element(`answer-${lane.name}`);
      lane.result = await answer([{ role: "user", content: question }], lane.drafts, stop.signal, (tokens, soFar) => {
        appendTokens(place, tokens);
        place.scrollTop = place.scrollHeight;
        show(`speed-${lane.name}`, speed(soFar), 1);
        if (lane.drafts) showFigures(soFar);
      });
    }
    tell(verdict(...lanes.map((lane) => lane.result)), true);
  } catch (error) {
    tell(error.name === "AbortError" ? "Stopped." : "The race could not be finished.", false);
    complain(error);
  }
  busy(null);
}

function tell(words, isVerdict) {
  const place = element("verdict");
  place.textContent = words;
  place.classList.toggle("told", isVerdict);
  // On a phone the lanes are longer than the screen, and the reader is below them when the race is over.
  if (isVerdict) place.scrollIntoView({ block: "nearest" });
}

function verdict(plain, drafts) {
  const isSame = plain.text === drafts.text;
  const [slow, fast] = [speed(plain), speed(drafts)];
  if (!slow || !fast) return "The answers are too short to compare.";
  const winner = fast >= slow ? "drafts" : "plain";
  element(`answer-${winner}`).parentElement.classList.add("winner");
  const words = isSame
    ? "The two answers are the same, word for word."
    : Number(element("temperature").value) > 0
      ? "At a temperature above 0 each answer is sampled anew, so the two differ."
      : "The answers diverge where two tokens are almost equally likely in this precision.";
  return `${(fast / slow).toFixed(2)} times the speed with drafts. ${words}`;
}

// The page -------------------------------------------------------------------------------------------------------------

function select(tab) {
  state.tab = tab;
  for (const name of ["chat", "race"]) {
    const isSelected = name === tab;
    element(`tab-${name}`).setAttribute("aria-selected", isSelected);
    element(`tab-${name}`).tabIndex = isSelected ? 0 : -1;
    element(`panel-${name}`).hidden = !isSelected;
  }
  element("send").textContent = tab === "race" ? "Race" : "Send";
  element("clear").hidden = tab === "race";
}

function submit() {
  const question = element("question").value.trim();
  if (!question || state.stop || !state.served) return;
  if (state.tab === "race") {
    race(question);
  } else {
    element("question").value = "";
    chat(question);
  }
}

async function connect() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw await refusal(response);
    state.served = (await response.json()).data[0];
  } catch (error) {
    element("served").textContent = "not connected";
    complain(error);
    return;
  }
  element("key-form").hidden = true;
  const { method, num_draft_tokens: usual, max_num_draft_tokens: most } = state.served.peagle || {};
  element("served").textContent = method ? `${state.served.id}, ${method}` : `${state.served.id}, no drafter`;
  const drafts = element("drafts");
  drafts.max = most || 0;
  drafts.value = usual || 0;
  drafts.disabled = !most;
  if (state.served.max_model_len) element("length").max = Math.min(2048, state.served.max_model_len);
  showSettings();
}

function showSettings() {
  for (const name of ["drafts", "temperature", "length"]) {
    element(`${name}-shown`).textContent = element(name).value;
  }
}

function listen() {
  for (const name of ["chat", "race"]) {
    element(`tab-${name}`).addEventListener("click", () => select(name));
    element(`tab-${name}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      select(name === "chat" ? "race" : "chat");
      element(`tab-${state.tab}`).focus();
    });
  }
  element("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  element("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && state.stop?.abort());
  element("stop").addEventListener("click", () => state.stop?.abort());
  element("clear").addEventListener("click", () => {
    state.stop?.abort();
    state.messages = [];
    keep();
    showChat();
    element("question").focus();
  });
  element("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    state.key = element("key").value;
    sessionStorage.setItem("peagle.key", state.key);
    connect();
  });
  for (const name of ["drafts", "temperature", "length"]) element(name).addEventListener("input", showSettings);
  element("examples").append(
    ...EXAMPLES.map((example) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = example;
      button.addEventListener("click", () => {
        element("question").value = example;
        submit();
      });
      return button;
    }),
  );
}

function restore() {
  try {
    state.messages = JSON.parse(sessionStorage.getItem(KEPT) || "[]");
  } catch {
    state.messages = [];
  }
  showChat();
}

listen();
restore();
showSettings();
connect();
