// Reads server-sent events.

/** Yield the events `{ id, data }` in the body of a response; the id is that of the last `id:` line. */
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    let rest = "";
    let id = null;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("id:")) id = line.slice(3).trim();
        if (line.startsWith("data:")) yield { id, data: line.slice(5).trim() };
      }
    }
  } finally {
    // Events after the last that was read are not wanted.
    reader.cancel().catch(() => {});
  }
}
