// What both tabs show: tokens, figures, settings, notices.

import { server } from "./api.js";

export const element = (id) => document.getElementById(id);

export function show(id, value, digits = 0) {
  element(id).textContent = value === null || value === undefined ? "-" : value.toFixed(digits);
}

export function appendTokens(place, tokens) {
  for (const { text, kind } of tokens) {
    if (!text) continue;
    const span = document.createElement("span");
    span.className = `token ${kind}`;
    span.title = kind;
    span.textContent = text;
    place.append(span);
  }
}

export function showFigures(answer) {
  const drafted = answer.steps.length;
  const accepted = answer.steps.reduce((sum, step) => sum + step.num_accepted, 0);
  show("figure-speed", answer.speed, 1);
  show("figure-length", drafted ? 1 + accepted / drafted : null, 2);
  show("figure-first", answer.first);
  show("figure-tokens", answer.tokens.length);
  showDepths(answer.steps);
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

export function notice(message) {
  element("notice").textContent = message || "";
  element("notice").hidden = !message;
}

export function complain(error) {
  if (error.name === "AbortError") return;
  if (error.status === 401) element("key-form").hidden = false;
  notice(error.status === 401 ? "" : error.message);
}

/** What is under way, to stop it; null: nothing is. */
export let running = null;

export function busy(stop, word = "Stop") {
  running = stop;
  element("send").disabled = Boolean(stop);
  element("stop").hidden = !stop;
  element("stop").textContent = word;
}

/** The settings as a request has them. All the drafts there are is the server's own choice. */
export function settings() {
  const drafts = element("drafts");
  return {
    numDrafts: drafts.value === drafts.max && server.model.peagle?.method ? null : Number(drafts.value),
    temperature: Number(element("temperature").value),
    maxTokens: Number(element("length").value),
  };
}

export function showSettings() {
  for (const name of ["drafts", "temperature", "length"]) {
    element(`${name}-shown`).textContent = element(name).value;
  }
}

/** Copy a text and say so on the button. Browsers offer the clipboard to secure pages only, hence the second way. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const words = (button.dataset.words ??= button.textContent);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = words), 1500);
}
