// Server-sent events of a response's body.

/** The data of each event. Comments, which keep the connection open, and fields other than data are passed over. */
export async function* eventData(body) {
  let data = [];
  for await (const line of lines(body)) {
    if (line === "") {
      if (data.length) yield data.join("\n");
      data = [];
    } else if (line.startsWith("data:")) {
      data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}

/** The complete lines; they may end in LF, CR or both, and be cut anywhere. */
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      // A CR at the very end may be the first half of a CR LF.
      const end = rest.endsWith("\r") ? rest.length - 1 : rest.length;
      const pieces = rest.slice(0, end).split(/\r\n|\n|\r/);
      rest = pieces.pop() + rest.slice(end);
      yield* pieces;
    }
  } finally {
    // Whoever stops reading ends the request: the server then stops computing.
    await reader.cancel().catch(() => {});
  }
}
