// Talking to the server: requests, streamed answers, and the same request as a curl command.

export const CHAT = "v1/chat/completions";
export const server = { key: sessionStorage.getItem("peagle.key") || "", model: null };

function headers() {
  const base = { "Content-Type": "application/json" };
  return server.key ? { ...base, Authorization: `Bearer ${server.key}` } : base;
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function checked(response) {
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not our error format, perhaps from a proxy
  }
  throw new Refused(response.status, message);
}

async function post(path, body, signal) {
  return checked(await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal }));
}

export async function models() {
  return (await (await checked(await fetch("v1/models", { headers: headers() }))).json()).data;
}

/** The request of `post` as a shell command. */
export function curl(path, body) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const given = Object.entries(headers()).map(([name, value]) => `-H ${quoted(`${name}: ${value}`)}`);
  return ["curl", "-N", quoted(new URL(path, document.baseURI).href), ...given, "-d", quoted(JSON.stringify(body))].join(" ");
}

/** The body of a chat request. `numDrafts` 0 decodes without drafts, null leaves their number to the server. */
export function chatBody(messages, { numDrafts, temperature, maxTokens, ...others }) {
  const speculation = { details: true, enabled: numDrafts !== 0 };
  if (numDrafts) speculation.num_draft_tokens = numDrafts;
  return {
    model: server.model.id,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature,
    max_tokens: maxTokens,
    speculation,
    ...others,
  };
}

/** The parsed chunks of a streamed answer. */
async function* chunks(body, signal) {
  const response = await post(CHAT, body, signal);
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

/** An answer as far as it was received; `arrivals` has what each chunk added, and after how many milliseconds. */
export class Answer {
  text = "";
  tokens = [];
  steps = [];
  arrivals = [];
  promptIds = [];
  tokenIds = [];
  finish = null;

  add(arrival) {
    this.arrivals.push(arrival);
    this.text += arrival.content;
    this.tokens.push(...arrival.tokens);
    if (arrival.step?.num_drafted) this.steps.push(arrival.step);
  }

  /** Milliseconds to the first token. */
  get first() {
    return this.arrivals[0]?.at ?? null;
  }

  get seconds() {
    return (this.arrivals.at(-1)?.at ?? 0) / 1000;
  }

  /** Tokens per second after the first chunk. */
  get speed() {
    const seconds = this.seconds - this.first / 1000;
    return seconds > 0 ? (this.tokens.length - this.arrivals[0].tokens.length) / seconds : null;
  }
}

/** Stream one answer and call `onTokens(tokens, answer)` as it grows. */
export async function ask(body, signal, onTokens) {
  const answer = new Answer();
  const started = performance.now();
  for await (const chunk of chunks(body, signal)) {
    const choice = chunk.choices[0];
    const content = choice?.delta?.content || "";
    const step = chunk.speculation;
    answer.promptIds.push(...(chunk.prompt_token_ids || []));
    answer.tokenIds.push(...(choice?.token_ids || []));
    if (choice?.finish_reason) answer.finish = choice.finish_reason;
    if (!content && !step) continue;
    const tokens = step?.tokens?.length ? step.tokens : [{ text: content, kind: "plain" }];
    answer.add({ at: performance.now() - started, content, tokens, step });
    onTokens?.(tokens, answer);
  }
  return answer;
}

/** The target's log-probabilities of single tokens that could follow `ids`, and how far the worst is from the best. */
export async function judge(ids, tokenIds, signal) {
  const prompt = tokenIds.map((id) => [...ids, id]);
  const body = { model: server.model.id, prompt, echo: true, max_tokens: 0, logprobs: 1 };
  const { choices } = await (await post("v1/completions", body, signal)).json();
  const rows = choices.map(({ logprobs }) => logprobs);
  const tokens = rows.map((row) => ({ text: row.tokens.at(-1), logprob: row.token_logprobs.at(-1) }));
  const best = Math.max(...rows.flatMap((row) => Object.values(row.top_logprobs.at(-1))), ...tokens.map((each) => each.logprob));
  return { tokens, gap: best - Math.min(...tokens.map((each) => each.logprob)) };
}
