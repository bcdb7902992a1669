// Runs before the page is painted, so that a chosen theme does not flash. Not a module for that reason.
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("pagewick.theme");
  } catch {
    // A browser that keeps nothing follows the system.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
