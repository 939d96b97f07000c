// Numbers as people read them.

export function formatCount(value) {
  return value.toLocaleString("en");
}

/** Return a measured number; small ones have a decimal. */
export function formatNumber(value) {
  return value < 10 && value > 0 ? value.toFixed(1) : formatCount(Math.round(value));
}

export function formatPercent(part, whole) {
  return whole ? `${formatNumber((100 * part) / whole)}%` : "-";
}

export function formatSeconds(seconds) {
  if (seconds < 0.01) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

/** Return the date of a time, or its hour if it is today. */
export function formatDate(timeMs) {
  const date = new Date(timeMs);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday
    ? date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })
    : date.toLocaleDateString([], { day: "numeric", month: "short" });
}
