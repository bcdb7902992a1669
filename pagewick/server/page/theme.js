// Applies the chosen theme before the first paint, to avoid a flash. Modules run later, so this is a plain script.
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("pagewick.theme");
  } catch {
    // Without storage, the system's theme applies.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
