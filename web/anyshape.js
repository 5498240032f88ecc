/** What AnyShape shows in the browser: the panel, the nodes' badges, the tables on Shape Cache Info. */

import { app } from "../../scripts/app.js";
import * as ahead from "./anyshape/ahead.js";
import * as badges from "./anyshape/badges.js";
import { compare, learn } from "./anyshape/compare.js";
import * as info from "./anyshape/info.js";
import * as names from "./anyshape/names.js";
import { makePanel } from "./anyshape/panel.js";
import * as settings from "./anyshape/settings.js";
import * as store from "./anyshape/store.js";
import { suggest } from "./anyshape/suggestions.js";
import * as texts from "./anyshape/texts.js";

const ID = "anyshape";
const COMPARE = "AnyShape.Compare";

/** A tab that the frontend may mount, and mount again, anywhere. */
function tab() {
  const panel = makePanel();
  let unwatch = null;
  const title = texts.words().title;
  return {
    id: ID,
    title,
    tooltip: title,
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

/** The sidebar's button and its command, in the language of now. */
function rename(manager) {
  const added = manager.getSidebarTabs?.().find((one) => one.id === ID);
  if (added) added.title = added.tooltip = texts.words().title;
}

/** From ComfyUI's menu: the panel says how it goes. */
function compareInPanel() {
  const manager = app.extensionManager;
  if (manager?.sidebarTab && manager.sidebarTab.activeSidebarTabId !== ID) manager.sidebarTab.activeSidebarTabId = ID;
  return compare();
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
    settings: settings.page(),
    ...(sidebar ? {} : { bottomPanelTabs: [tab()] }),

    async setup() {
      addStyle();
      if (sidebar) manager.registerSidebarTab(tab());
      texts.onLanguage(() => {
        if (sidebar) rename(manager);
        settings.rename();
        store.refresh();
      });
      ahead.listen();
      badges.listen();
      store.watch(badges.show);
      store.watch(info.show);
      await store.connect();
    },

    commands: [{ id: COMPARE, label: () => texts.words().compare.title, icon: "pi pi-clock", function: compareInPanel }],
    menuCommands: [{ path: ["AnyShape"], commands: [COMPARE] }],

    beforeRegisterNodeDef(type, definition) {
      names.describe(definition);
      learn(definition);
      suggest(LiteGraph); // ComfyUI makes its lists again with each node, right before this
    },

    nodeCreated(node) {
      names.label(node);
      settings.useBudget(node);
      badges.addBadge(node);
      info.addInfo(node);
    },
  });
}

if (await texts.load()) register();
else console.warn("AnyShape: this ComfyUI serves no texts of node packs (/i18n), so nothing is shown of the pack.");
