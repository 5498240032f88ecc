/** What AnyShape shows in the browser: the panel, the nodes' badges, the tables on Shape Cache Info. */

import { app } from "../../scripts/app.js";
import * as badges from "./anyshape/badges.js";
import * as info from "./anyshape/info.js";
import { makePanel } from "./anyshape/panel.js";
import * as store from "./anyshape/store.js";
import * as texts from "./anyshape/texts.js";

const ID = "anyshape";
const TITLE = "Shape cache"; // also the key of its translation, for frontends that look one up

/** A tab that the frontend may mount, and mount again, anywhere. */
function tab() {
  const panel = makePanel();
  let unwatch = null;
  return {
    id: ID,
    title: TITLE,
    tooltip: TITLE,
    icon: "pi pi-th-large",
    type: "custom",
    render: (container) => {
      if (panel.element.parentElement === container) return;
      container.classList.add("anyshape-tab");
      container.replaceChildren(panel.element);
      unwatch ??= store.watch(panel.show);
    },
    destroy: () => {
      unwatch?.();
      unwatch = null;
      panel.element.remove();
    },
  };
}

function addStyle() {
  const href = new URL("./anyshape/style.css", import.meta.url).href;
  document.head.append(Object.assign(document.createElement("link"), { rel: "stylesheet", href }));
}

function register() {
  const manager = app.extensionManager;
  const sidebar = typeof manager?.registerSidebarTab === "function";
  app.registerExtension({
    name: "AnyShape",
    ...(sidebar ? {} : { bottomPanelTabs: [tab()] }),

    async setup() {
      addStyle();
      if (sidebar) manager.registerSidebarTab(tab());
      texts.onLanguage(store.refresh);
      badges.listen();
      store.watch(badges.show);
      store.watch(info.show);
      await store.connect();
    },

    nodeCreated(node) {
      badges.addBadge(node);
      info.addInfo(node);
    },
  });
}

if (await texts.load()) register();
else console.warn("AnyShape: this ComfyUI serves no texts of node packs (/i18n), so nothing is shown of the pack.");
