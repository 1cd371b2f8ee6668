// The playground: a chat that colors each token by how it was produced, and the race (race.js).

import { CHAT, ask, chatBody, curl, models, server } from "./api.js";
import { laneBody, race, replay } from "./race.js";
import { appendTokens, busy, complain, copy, element, notice, running, settings, showFigures, showSettings } from "./show.js";

// The first is ready in the box. Its acceptance length is close to the average of the shipped drafter's card.
const EXAMPLES = [
  "A shop sells pens at 3 dollars each. How much are 14 pens? Think step by step.",
  "Explain how rainbows form, in five sentences.",
  "Write a Python function that reverses a string.",
];
const KEPT = "peagle.chat";

const state = { messages: [], tab: "chat" };

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

/** The request that asks for the next message, after `question` if it is given. */
function askedBody(question) {
  const all = question ? [...state.messages, { role: "user", content: question }] : state.messages;
  const messages = all.filter(({ content }) => content).map(({ role, content }) => ({ role, content }));
  return chatBody(messages, settings());
}

async function chat(question) {
  notice("");
  state.messages.push({ role: "user", content: question });
  const body = askedBody();
  const message = { role: "assistant", content: "", tokens: [] };
  state.messages.push(message);
  showChat();
  message.end = "cut off by a reload"; // shown only if the page reloads before the answer ends
  keep();
  const item = element("messages").lastElementChild;
  const stop = new AbortController();
  busy(stop);
  try {
    const result = await ask(body, stop.signal, (tokens, soFar) => {
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
  for (const id of ["clear", "curl"]) element(id).hidden = tab === "race";
  element("replay").parentElement.classList.toggle("race", tab === "race");
  if (tab === "race" && !element("question").value.trim()) offer();
}

function submit() {
  const question = element("question").value.trim();
  if (!question || running || !server.model) return;
  if (state.tab === "race") {
    race(question);
  } else {
    element("question").value = "";
    chat(question);
  }
}

async function connect() {
  try {
    [server.model] = await models();
  } catch (error) {
    element("served").textContent = "not connected";
    complain(error);
    return;
  }
  element("key-form").hidden = true;
  const { method, num_draft_tokens: usual, max_num_draft_tokens: most } = server.model.peagle || {};
  element("served").textContent = method ? `${server.model.id}, ${method}` : `${server.model.id}, no drafter`;
  const drafts = element("drafts");
  drafts.max = most || 0;
  drafts.value = usual || 0;
  drafts.disabled = !most;
  if (server.model.max_model_len) element("length").max = Math.min(2048, server.model.max_model_len / 2);
  showSettings();
}

/** Put a question in the box: the last one asked, or the first example. */
function offer() {
  const asked = state.messages.filter(({ role }) => role === "user");
  element("question").value = asked.at(-1)?.content || EXAMPLES[0];
}

function copyCurl(button, bodyOf) {
  const question = element("question").value.trim();
  if (!server.model) return;
  if (!question) return notice("Write a message first: its request is copied.");
  notice("");
  copy(curl(CHAT, bodyOf(question)), button);
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
  document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
  element("stop").addEventListener("click", () => running?.abort());
  element("replay").addEventListener("click", () => running || replay());
  element("curl").addEventListener("click", ({ target }) => copyCurl(target, askedBody));
  for (const lane of ["plain", "drafts"]) {
    element(`curl-${lane}`).addEventListener("click", ({ target }) => copyCurl(target, (question) => laneBody(lane, question)));
  }
  element("clear").addEventListener("click", () => {
    running?.abort();
    state.messages = [];
    keep();
    showChat();
    offer();
    element("question").focus();
  });
  element("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    server.key = element("key").value;
    sessionStorage.setItem("peagle.key", server.key);
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
  if (!state.messages.length) offer();
}

listen();
restore();
showSettings();
connect();
