// Conversations in this browser: in IndexedDB, for this server's address alone. What the list shows of them, their
// heads, lies apart from what was said, so that the list is read without it.

const HEADS = "heads";
const BODIES = "bodies";
const tabs = new BroadcastChannel("offload-runtime"); // of one browser
let opened = null;

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function database() {
  if (opened) return opened;
  const request = indexedDB.open("offload-runtime", 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore(HEADS, { keyPath: "id" });
    request.result.createObjectStore(BODIES);
  };
  opened = settled(request);
  return opened;
}

async function change(id, work) {
  const changes = (await database()).transaction([HEADS, BODIES], "readwrite", { durability: "relaxed" });
  const whole = new Promise((resolve, reject) => {
    changes.oncomplete = resolve;
    changes.onabort = () => reject(changes.error);
  });
  work(changes.objectStore(HEADS), changes.objectStore(BODIES));
  await whole;
  tabs.postMessage(id);
}

// Calls back with an event whose data is the id of a conversation that another tab has changed or deleted.
export function onChange(callback) {
  tabs.onmessage = callback;
}

// Heads of all conversations: `id`, `title`, `changed` in ms.
export async function heads() {
  return settled((await database()).transaction(HEADS).objectStore(HEADS).getAll());
}

// What was said; undefined where it was deleted.
export async function body(id) {
  return settled((await database()).transaction(BODIES).objectStore(BODIES).get(id));
}

export function write(head, said) {
  return change(head.id, (ofHeads, ofBodies) => {
    ofHeads.put(head);
    ofBodies.put(said, head.id);
  });
}

export function remove(id) {
  return change(id, (ofHeads, ofBodies) => {
    ofHeads.delete(id);
    ofBodies.delete(id);
  });
}
