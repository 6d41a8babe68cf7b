// The keyboard. A view binds its keys when it is shown; leaving it unbinds them.

let bound = new Map();
const always = new Map();

export function bindKeys(keys) {
  bound = new Map(Object.entries(keys));
}

export function bindAlways(keys) {
  for (const [key, action] of Object.entries(keys)) always.set(key, action);
}

export function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const target = event.target;
    const writing = target instanceof HTMLElement && (target.matches("input, textarea, select") || target.isContentEditable);
    if (writing) {
      if (event.key === "Escape") target.blur();
      return;
    }
    if (event.key === "Enter" && target instanceof HTMLElement && target.matches("a, button, summary")) return;
    const action = bound.get(event.key) ?? always.get(event.key);
    if (action) {
      event.preventDefault();
      action(event);
    }
  });
}
