// The parameters of requests, kept in this browser's storage. The API key is not among them.

import { byId } from "./dom.js";

const STORAGE_KEY = "pagedray.settings";

/** A field has what is no value of its parameter. */
class SettingError extends Error {}

const READERS = {
  number: (text) => {
    const number = Number(text);
    if (!Number.isFinite(number)) throw new SettingError("must be a number");
    return number;
  },
  numbers: (text) => text.split(/[\s,]+/).filter(Boolean).map(READERS.number),
  // Spaces may matter in the strings.
  lines: (text) => text.split("\n").filter((line) => line !== ""),
  text: (text) => text,
  json: (text) => {
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new SettingError(`must be JSON: ${error.message}`);
    }
  },
};

export class Settings {
  #form = byId("settings-form");

  constructor() {
    this.#restore();
    const dialog = byId("settings");
    byId("settings-button").addEventListener("click", () => dialog.showModal());
    byId("settings-reset").addEventListener("click", () => {
      for (const field of this.#fields) this.#set(field, "");
      this.#keep();
    });
    this.#form.addEventListener("input", () => this.#keep());
  }

  get system() {
    return this.#form.elements.namedItem("system").value.trim();
  }

  /** Return the parameters that are set. Throws an error that names the field. */
  parameters() {
    const found = {};
    for (const field of this.#fields) {
      const { name, dataset } = field;
      if (name === "system") continue;
      if (field.type === "checkbox") {
        if (field.checked) found[name] = true;
        continue;
      }
      const text = field.value;
      // A number field has no value if what is in it is no number.
      if (field.validity.badInput) throw new SettingError(`${name} must be a number.`);
      if (text.trim() === "") continue;
      try {
        const value = READERS[dataset.kind](text);
        if (name === "schema") found.response_format = schemaFormat(value);
        else if (name === "more") Object.assign(found, objectOf(value));
        else found[name] = value;
      } catch (error) {
        if (error instanceof SettingError) throw new SettingError(`${name} ${error.message}.`);
        throw error;
      }
    }
    return found;
  }

  /** Show the values that requests use which set nothing. */
  showDefaults(defaults) {
    for (const [name, value] of Object.entries(defaults)) {
      const field = this.#form.elements.namedItem(name);
      if (field) field.placeholder = `${value} (the model's)`;
    }
  }

  get #fields() {
    return [...this.#form.elements].filter((field) => field.name);
  }

  #set(field, value) {
    if (field.type === "checkbox") field.checked = value === true;
    else field.value = value;
  }

  #keep() {
    const values = {};
    for (const field of this.#fields) {
      const value = field.type === "checkbox" ? field.checked : field.value;
      if (value) values[field.name] = value;
    }
    byId("settings-button").classList.toggle("changed", Object.keys(values).length > 0);
    try {
      localStorage.setItem(STORAGE_KEY, JSON.stringify(values));
    } catch {
      // They stay on the page.
    }
  }

  #restore() {
    try {
      const values = JSON.parse(localStorage.getItem(STORAGE_KEY)) ?? {};
      for (const field of this.#fields) {
        if (field.name in values) this.#set(field, values[field.name]);
      }
    } catch {
      // Nothing is stored, or the browser allows no storage.
    }
    this.#keep();
  }
}

function objectOf(value) {
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new SettingError("must be a JSON object");
  }
  return value;
}

function schemaFormat(schema) {
  return { type: "json_schema", json_schema: { name: "answer", schema } };
}
