// Parser for server-sent events.

/** Yield the data of each event. Comments (keep-alives) and other fields are skipped. */
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

/** Yield complete lines. They may end in LF, CR or CR LF, and chunks may cut them anywhere. */
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      // A CR at the end of a chunk may be the first half of a CR LF.
      const end = rest.endsWith("\r") ? rest.length - 1 : rest.length;
      const pieces = rest.slice(0, end).split(/\r\n|\n|\r/);
      rest = pieces.pop() + rest.slice(end);
      yield* pieces;
    }
  } finally {
    // When the reader stops early, cancelling ends the request, and the server stops generating.
    await reader.cancel().catch(() => {});
  }
}
