// The admin's way in: sends the password, shows why it was refused, goes on to the admin view.

import { call } from "./api.js";
import { byId, showSlots } from "./frame.js";

showSlots();
const form = byId("admin-login");
const password = byId("admin-password");
const said = byId("admin-login-said");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = form.querySelector("button");
  button.disabled = true;
  try {
    await call("POST", "/admin/login", { password: password.value });
    location.assign("/admin");
  } catch (error) {
    said.textContent = error.message;
    password.setAttribute("aria-invalid", "true");
    password.select();
    button.disabled = false;
  }
});
