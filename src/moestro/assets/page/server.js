// Requests to the page's own server, with the key that the user has given. The key lives in sessionStorage: it ends with the tab.

import { byId, setText } from "./dom.js";

export const program = document.documentElement.dataset.program;
export const plane = document.documentElement.dataset.plane;

const STORED = "moestro-key";
const FLAG = plane === "operators" ? "--admin-api-key" : "--api-key";
let asking = null; // promise of a new key, while the dialog is open
let isDeclined = false; // the user has closed the dialog: only what the user does opens it again

/** The user wants something: the dialog may open again. */
export const allowDialog = () => { isDeclined = false; };

/** Lets the user give or forget a key; resolves when one is given. */
export function changeKey(before) {
  isDeclined = false;
  asking ??= openDialog(before).finally(() => { asking = null; });
  return asking;
}

/** Sends a request, with a key if there is one. On 401 it asks the user for another key, and tries again.
 *  `options.onsend` is called when the request is sent. */
export async function ask(path, { onsend = () => {}, ...options } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(STORED);
    const headers = { ...options.headers };
    if (key) headers.Authorization = `Bearer ${key}`;
    onsend();
    const answer = await fetch(path, { ...options, headers, cache: "no-store" }).catch(unreachable);
    if (answer.status !== 401) return answer;
    await otherKey(key);
  }
}

/** Returns the JSON of a path; an error has the text of the server's refusal. */
export async function read(path, options) {
  const answer = await ask(path, options);
  if (!answer.ok) throw new Error(await refusal(answer));
  return answer.json();
}

/** The text of a refusal. */
export async function refusal(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answered with status ${answer.status}.`;
  }
}

async function otherKey(refused) {
  if (sessionStorage.getItem(STORED) !== refused) return; // another request has brought a new one meanwhile
  if (isDeclined) throw new Error("A key is needed: press “Key”.");
  await changeKey(refused ? "The server does not accept this key. " : "");
}

function unreachable(error) {
  throw error.name === "AbortError" ? error : new Error("The server does not answer.");
}

function openDialog(before = "") {
  const dialog = byId("key-dialog");
  setText(byId("key-title"), plane === "operators" ? "Admin key" : "API key");
  setText(byId("key-text"), `${before}This ${program === "route" ? "router" : "server"} was started with ${FLAG}.`);
  byId("key").value = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve, reject) => {
    const form = byId("key-form");
    form.onsubmit = event => {
      event.preventDefault();
      isDeclined = false;
      sessionStorage.setItem(STORED, byId("key").value.trim());
      dialog.close("given");
    };
    dialog.onclose = () => {
      byId("key").value = "";
      if (dialog.returnValue === "given") return resolve();
      isDeclined = true;
      reject(new Error("A key is needed: press “Key”."));
    };
    byId("key-cancel").onclick = () => dialog.close("");
    byId("key-forget").onclick = () => { sessionStorage.removeItem(STORED); dialog.close(""); };
    dialog.returnValue = "";
  });
}
