// The race: one question with and without drafts. Each lane is measured alone; then both are replayed side by side.

import { Answer, ask, chatBody, judge, server } from "./api.js";
import { appendTokens, busy, complain, element, notice, settings, show, showFigures } from "./show.js";

const LANES = { plain: "without drafts", drafts: "with drafts" };
const SHOW_EVERY = 250; // milliseconds between counts while a lane is measured: drawing would slow it down

let recorded = null;

/** The request of a lane. */
export function laneBody(name, question) {
  const given = settings();
  const numDrafts = name === "plain" ? 0 : given.numDrafts || null;
  return chatBody([{ role: "user", content: question }], { ...given, numDrafts, return_token_ids: true });
}

export async function race(question) {
  notice("");
  clear();
  recorded = null;
  element("replay").hidden = true;
  if (!server.model.peagle?.method) {
    tell("This server has no drafter, so there is nothing to race against. Start it with --drafter.");
    return;
  }
  const stop = new AbortController();
  busy(stop);
  try {
    const bodies = Object.keys(LANES).map((name) => laneBody(name, question));
    const lanes = await measure(bodies, stop.signal);
    recorded = { lanes, ...(await compare(lanes, bodies[0].temperature, stop.signal)) };
    await replay();
  } catch (error) {
    tell(error.name === "AbortError" ? "Stopped." : "The race could not be finished.");
    complain(error);
  }
  busy(null);
}

async function measure(bodies, signal) {
  tell("Warming up.");
  // Afterwards both lanes find the prompt in the server's cache.
  await ask({ ...bodies[1], max_tokens: 1 }, signal);
  const lanes = {};
  for (const [index, [name, words]] of Object.entries(LANES).entries()) {
    let shown = 0;
    tell(`Measuring ${words}.`);
    lanes[name] = await ask(bodies[index], signal, (_, answer) => {
      if (performance.now() - shown < SHOW_EVERY) return;
      shown = performance.now();
      tell(`Measuring ${words}: ${answer.tokens.length} tokens.`);
    });
  }
  return lanes;
}

/** Play the recording at the speed at which it was measured; Stop skips to its end. */
export async function replay() {
  const { lanes, words, evidence, index } = recorded;
  const stop = new AbortController();
  busy(stop, "Skip");
  clear();
  tell("Replaying both as they were measured.");
  const played = Object.fromEntries(Object.keys(lanes).map((name) => [name, new Answer()]));
  const started = performance.now();
  const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
  let isOver = false;
  while (!isOver) {
    const elapsed = isStill || stop.signal.aborted ? Infinity : performance.now() - started;
    isOver = Object.keys(lanes).map((name) => playUntil(elapsed, name, lanes[name], played[name])).every(Boolean);
    if (!isOver) await nextFrame(stop.signal);
  }
  mark(lanes, index);
  const [slow, fast] = [lanes.plain.speed, lanes.drafts.speed];
  if (slow && fast) element(`answer-${fast >= slow ? "drafts" : "plain"}`).parentElement.classList.add("winner");
  showEvidence(evidence);
  tell(`${slow && fast ? `${(fast / slow).toFixed(2)} times the speed with drafts. ` : ""}${words}`, true);
  element("replay").hidden = false;
  busy(null);
}

/** Show what had arrived after `elapsed` milliseconds; true when that is all. */
function playUntil(elapsed, name, lane, played) {
  const place = element(`answer-${name}`);
  const due = lane.arrivals.slice(played.arrivals.length).filter(({ at }) => at <= elapsed);
  for (const arrival of due) {
    played.add(arrival);
    appendTokens(place, arrival.tokens);
  }
  const isOver = played.arrivals.length === lane.arrivals.length;
  if (due.length) {
    place.scrollTop = place.scrollHeight;
    show(`speed-${name}`, played.speed, 1);
    if (name === "drafts") showFigures(played);
  }
  const seconds = isOver ? lane.seconds : elapsed / 1000;
  element(`count-${name}`).textContent = `${played.tokens.length} tokens in ${seconds.toFixed(1)} s`;
  return isOver;
}

function nextFrame(signal) {
  return new Promise((resolve) => {
    requestAnimationFrame(resolve);
    signal.addEventListener("abort", resolve, { once: true });
  });
}

/** What to say about the two answers, with the evidence if they differ. */
async function compare({ plain, drafts }, temperature, signal) {
  const [ours, theirs] = [plain.tokenIds, drafts.tokenIds];
  const index = ours.findIndex((id, place) => id !== theirs[place]);
  if (index < 0 && ours.length === theirs.length) return { words: "The answers are the same, token for token." };
  if (temperature > 0) return { words: "Each answer is sampled at this temperature, so the two differ." };
  const where = index < 0 ? ours.length : index;
  const found = { index: where, words: `The answers differ from token ${where + 1} on. This is a difference.` };
  const differing = [ours[where], theirs[where]];
  if (differing.includes(undefined)) return { ...found, evidence: { problem: "One answer ends there, the other goes on." } };
  try {
    const evidence = await judge([...plain.promptIds, ...ours.slice(0, where)], differing, signal);
    const limit = server.model.peagle.near_tie;
    if (evidence.gap <= limit) found.words = `The answers differ from token ${where + 1} on, at a near tie.`;
    return { ...found, evidence: { ...evidence, limit } };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { ...found, evidence: { problem: `The server gave no log-probabilities: ${error.message}` } };
  }
}

function showEvidence(evidence) {
  element("evidence").hidden = !evidence;
  element("tokens-differing").hidden = !evidence?.tokens;
  if (!evidence) return;
  const { tokens, gap, limit, problem } = evidence;
  Object.keys(LANES).forEach((name, lane) => {
    element(`token-${name}`).textContent = JSON.stringify(tokens?.[lane].text ?? "");
    show(`logprob-${name}`, tokens?.[lane].logprob, 4);
  });
  const side = gap <= limit ? "within" : "beyond";
  element("gap").textContent = problem || `Gap to the target's best token: ${gap.toFixed(4)}, ${side} what rounding explains in its precision (${limit}).`;
}

/** Outline the first token that differs. */
function mark(lanes, index) {
  if (index === undefined) return;
  for (const name of Object.keys(LANES)) {
    const shown = lanes[name].tokens.slice(0, index).filter(({ text }) => text).length;
    if (lanes[name].tokens[index]?.text) element(`answer-${name}`).children[shown]?.classList.add("differs");
  }
}

function clear() {
  for (const name of Object.keys(LANES)) {
    element(`answer-${name}`).replaceChildren();
    element(`answer-${name}`).parentElement.classList.remove("winner");
    element(`count-${name}`).textContent = "";
    show(`speed-${name}`, null);
  }
  showEvidence(null);
}

function tell(words, isVerdict = false) {
  const place = element("verdict");
  place.textContent = words;
  place.classList.toggle("told", isVerdict);
  // On a phone the lanes are longer than the screen, and the reader is below them when the race is over.
  if (isVerdict) place.scrollIntoView({ block: "nearest" });
}
