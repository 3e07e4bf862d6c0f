// Opens a URL of Perfetto with a trace, and writes what it draws: node trace.mjs URL PICTURE. Fails if Perfetto has left anything out.
import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";

const [url, picture] = process.argv.slice(2);
const browser = await puppeteer.launch({ executablePath: await chromium.executablePath(), args: chromium.args, headless: "shell" });
try {
  const page = await browser.newPage();
  await page.setViewport({ width: 1400, height: 720 });
  await page.goto(url);
  await page.waitForFunction(() => globalThis.app?.trace?.engine, { timeout: 60_000 });
  const errors = await page.evaluate(async () => {
    await globalThis.waitForPerfettoIdle();
    const { trace } = globalThis.app;
    trace.workspace.children.forEach((process) => process.expand());
    const found = await trace.engine.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0");
    const rows = [];
    for (const row = found.iter({}); row.valid(); row.next()) rows.push(`${row.get("name")}: ${row.get("value")}`);
    await globalThis.waitForPerfettoIdle();
    return rows;
  });
  await page.screenshot({ path: picture, clip: { x: 0, y: 40, width: 1400, height: 600 } });
  if (errors.length) throw new Error(errors.join("\n"));
} finally {
  await browser.close();
}
