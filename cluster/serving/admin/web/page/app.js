// The web page of a PagedRay server: a chat with its model, and live statistics.

import { Chat } from "./chat/chat.js";
import { Composer } from "./chat/composer.js";
import { History } from "./chat/history.js";
import { HistoryView } from "./chat/history_view.js";
import { Scroll } from "./chat/scroll.js";
import { byId } from "./dom.js";
import { Drawer } from "./drawer.js";
import { showIdleCard } from "./idle_card.js";
import { KeyDialog } from "./key_dialog.js";
import { Server } from "./server.js";
import { Settings } from "./settings.js";
import { Panel } from "./statistics/panel.js";
import { Poller } from "./statistics/poller.js";
import { showStatus } from "./status.js";

const NO_CHAT = "This model only computes embeddings or scores; it cannot chat.";

let info = null;
const server = new Server();
const settings = new Settings();
const history = new History();
const panel = new Panel();
const conversations = new Drawer("history", "history-button", "75rem");
new Drawer("stats", "stats-button", "56rem");

const chat = new Chat({
  server,
  settings,
  history,
  scroll: new Scroll(),
  model: () => info?.model,
  onChange: () => {
    byId("empty").hidden = !chat.isEmpty;
    composer.show(info?.is_encoder ? NO_CHAT : "");
    historyView.show(chat.id);
  },
  onUnanswered: (text) => composer.putBack(text),
});
const composer = new Composer(chat);
const historyView = new HistoryView(history, (found) => {
  chat.open(found);
  conversations.closeIfNarrow();
  composer.focus();
});
byId("new-chat").addEventListener("click", () => {
  chat.open();
  conversations.closeIfNarrow();
  composer.focus();
});

const poller = new Poller(server, {
  info: (found) => {
    info = found;
    byId("model").textContent = info.model;
    document.title = `${info.model} - PagedRay`;
    settings.showDefaults(info.sampling_defaults);
    showIdleCard(info, server);
    byId("idle").hidden = false;
    composer.show(info.is_encoder ? NO_CHAT : "");
  },
  loads: (loads) => {
    showStatus(loads.is_ready ? "ready" : "down", loads.is_ready ? "Ready" : "Not ready");
    panel.showLoads(loads);
  },
  history: (found) => panel.showHistory(found),
  problem: (error) => {
    if (error.status === 401) {
      showStatus("locked", "API key required");
      keys.ask();
    } else if (error.status === 0) {
      showStatus("down", "Unreachable");
    } else {
      showStatus("down", error.status === 503 ? "Not ready" : error.message);
    }
  },
});
const keys = new KeyDialog(server, () => poller.refresh());

// A server would go on with the answer for half a minute.
addEventListener("pagehide", () => chat.stop());

chat.open();
poller.start();
