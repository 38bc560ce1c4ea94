# The reports of several runs, one after another, as a table with a line for each.
function value() { sub(/^"[a-z_]+": /, ""); sub(/,$/, ""); gsub(/"/, ""); return $0 }
function number(text, format) { return text == "null" || text == "" ? "-" : sprintf(format, text) }
BEGIN {
  format = "%-20s %4s %11s %9s %11s %5s %11s %12s %12s\n"
  printf format, "chapter", "GPUs", "final loss", "accuracy", "difference", "check", "step", \
         "sent/step", "peak/GPU"
}
/^"chapter": / { chapter = value() }
/^"settings": / { match($0, /"gpus": [0-9]+/); gpus = substr($0, RSTART + 8, RLENGTH - 8) }
/^"final_loss": / { loss = value() }
/^"test_accuracy": / { accuracy = value() }
/^"step_seconds": / { step = value() }
/^"bytes_sent_per_step": / { sent = value() }
/^"peak_memory": / { peak = value() }
/^"difference": / { difference = value() }
/^"check": / { check = value() }
/^}/ {
  printf format, chapter, gpus, number(loss, "%.5g"), number(accuracy * 100, "%.2f %%"), \
         number(difference, "%.2g"), check == "null" ? "-" : check, \
         number(step * 1e6, "%.1f us"), number(sent, "%.0f B"), number(peak, "%.0f B")
}
