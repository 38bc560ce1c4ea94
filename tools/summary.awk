# The reports of several runs, one after another, as a table with a line for each. Before a report
# there may be the run's timeline as text, which ends each GPU's row with how busy it is. Speed-up
# is the step's against that of the first report.
function value() { sub(/^"[a-z_]+": /, ""); sub(/,$/, ""); gsub(/"/, ""); return $0 }
function number(text, format) { return text == "null" || text == "" ? "-" : sprintf(format, text) }
BEGIN {
  format = "%-18s %4s %10s %8s %8s %5s %9s %8s %5s %9s %10s\n"
  printf format, "chapter", "GPUs", "final loss", "accuracy", "differs", "check", "step", \
         "speed-up", "busy", "sent/step", "peak/GPU"
}
/^GPU [0-9].*%$/ { busy += $NF; ++rows }
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
  if (first == "") first = step
  printf format, chapter, gpus, number(loss, "%.5g"), number(accuracy * 100, "%.2f %%"), \
         number(difference, "%.1e"), check == "null" ? "-" : check, \
         number(step * 1e6, "%.1f us"), number(step > 0 ? first / step : "", "%.2f"), \
         number(rows ? busy / rows : "", "%.0f %%"), number(sent, "%.0f B"), number(peak, "%.0f B")
  busy = rows = 0
}
