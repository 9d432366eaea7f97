// Requests to the server of this page, and its errors.

let key = "";

export function setKey(text) {
  key = text;
}

export function hasKey() {
  return key !== "";
}

// What went wrong, in the server's words or in those for what it could not say itself.
export class RequestError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function errorOf(response) {
  if (response.status === 401) {
    return new RequestError(key ? "this is not the API key of this server" : "this server needs its API key", 401);
  }
  const said = await response.json().catch(() => null);
  const message = said?.error?.message ?? `the server answered ${response.status} ${response.statusText}`.trim();
  const wait = response.headers.get("Retry-After");
  return new RequestError(wait ? `${message} (again in ${wait} s)` : message, response.status);
}

// A response that is fine; else raises RequestError.
export async function send(path, body, signal) {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const asked = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  let response;
  try {
    response = await fetch(path, { ...asked, headers, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("the server cannot be reached");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

// The chunks of a chat's stream, and what its comments say that it waits for (`waitsFor`).
export async function* chunks(body, signal) {
  const response = await send("/v1/chat/completions", body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ; ) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new RequestError("the connection to the server was lost");
    }
    if (read.done) throw new RequestError("the answer broke off: the server has closed the connection");
    const lines = (held + read.value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith(": ") && !line.startsWith(": ping")) yield { waitsFor: line.slice(2).trim(), choices: [] };
      if (!line.startsWith("data: ")) continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new RequestError(chunk.error.message);
      yield chunk;
    }
  }
}
