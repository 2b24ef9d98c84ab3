// Repeats a task while the page is visible.

export const REFRESH_MS = 5000;
const SLOWEST_MS = 60_000;

/** Call `task` now and every `every` ms. It pauses in a hidden tab, and waits longer after each error. */
export function poll(task, every, onerror) {
  let [timer, stopped, running, again, delay] = [null, false, false, false, every];
  async function run() {
    clearTimeout(timer);
    again = running; // what has changed since the task began is read when it ends
    if (stopped || running || document.hidden) return;
    running = true;
    try {
      await task();
      delay = every;
    } catch (error) {
      delay = Math.min(delay * 2, SLOWEST_MS);
      if (!stopped) onerror(error);
    }
    running = false;
    if (!stopped) timer = setTimeout(run, again ? 0 : delay);
  }
  document.addEventListener("visibilitychange", run);
  run();
  return {
    now: run,
    stop() {
      stopped = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", run);
    },
  };
}
