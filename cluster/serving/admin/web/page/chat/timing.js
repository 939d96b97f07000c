// What is said about the time that an answer took.

import { formatCount, formatNumber, formatSeconds } from "../format.js";

/** Return the speed and times of an answer as a text. */
export function timingText({ tokens, seconds, firstSeconds, reason }) {
  const parts = [];
  const rate = rateOf(tokens, seconds, firstSeconds);
  if (rate !== null) parts.push(`${formatNumber(rate)} tokens/s`);
  if (firstSeconds !== null) parts.push(`first token ${formatSeconds(firstSeconds)}`);
  const count = tokens === null ? "" : `${formatCount(tokens)} token${tokens === 1 ? "" : "s"} in `;
  parts.push(`${count}${formatSeconds(seconds)}`);
  if (reason === "length") parts.push("cut off at the token limit");
  if (reason === "interrupted") parts.push(reason);
  if (reason === null) parts.push("stopped");
  return parts.join(" \u00b7 ");
}

/** Return the tokens per second after the first one. */
function rateOf(tokens, seconds, firstSeconds) {
  if (tokens === null || tokens < 2 || firstSeconds === null) return null;
  return seconds > firstSeconds ? (tokens - 1) / (seconds - firstSeconds) : null;
}
