// A page that is not there: only the frame around it.

import { showSlots } from "./frame.js";

showSlots();
