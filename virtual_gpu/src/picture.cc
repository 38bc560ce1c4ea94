// The timeline as SVG and as text. What lies next to each other in one stream under one NVTX
// range is one box, so a box is a phase of the step and not a kernel.
#include "picture.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "runtime.h"

namespace virtual_gpu {
namespace {

enum Look { forward, backward, arithmetic, communication, copying };

struct Box {
  Look look;
  std::string name, number;  // "forward", "3"; "3'": of another chunk
  Picoseconds start, end;
  std::string label() const { return number.empty() ? name : name + " " + number; }
};

struct Row {  // a stream
  int device, stream;
  std::string role;
  std::vector<Box> boxes;
};

struct Picture {
  Picoseconds first = 0, span = 1, axis = 1;    // the axis is at least as long as the span
  std::vector<Row> rows;
  std::map<int, double> busy;                   // by GPU: time with arithmetic over the span
  std::map<int64_t, Picoseconds> steps;         // where each begins
};

Box box_of(const Operation& o) {
  const bool named = *o.range && o.range != o.step;
  Box b{arithmetic, named ? o.range : o.call, "", o.start, o.end};
  const size_t space = b.name.rfind(' ');
  if (space != std::string::npos && space > 0 && space + 1 < b.name.size() &&
      b.name.find_first_not_of("0123456789'", space + 1) == std::string::npos) {
    b.number = b.name.substr(space + 1);
    b.name.erase(space);
  }
  if (o.kind == Kind::copy) b.look = copying;
  else if (o.kind == Kind::collective || o.kind == Kind::transfer) b.look = communication;
  else if (b.name == "F" || b.name.rfind("forward", 0) == 0) b.look = forward;
  else if (b.name == "B" || b.name.rfind("backward", 0) == 0) b.look = backward;
  return b;
}

// A pause is kept where it can be seen.
void add(Row& row, const Box& b, Picoseconds span) {
  if (b.start == b.end) return;
  if (!row.boxes.empty()) {
    Box& last = row.boxes.back();
    const bool same = last.look == b.look && last.label() == b.label();
    if (same && b.start - last.end <= span / 2000) {
      last.end = b.end;
      return;
    }
  }
  row.boxes.push_back(b);
}

// How much of the time at least one of the GPU's streams computes.
std::map<int, double> busy_parts(const std::vector<Operation>& operations, Picoseconds span) {
  std::map<int, std::vector<std::pair<Picoseconds, Picoseconds>>> spells;
  for (const Operation& o : operations) {
    auto& own = spells[o.device];
    if (o.kind == Kind::kernel || o.kind == Kind::gemm) own.push_back({o.start, o.end});
  }
  std::map<int, double> parts;
  for (auto& [device, own] : spells) {
    std::sort(own.begin(), own.end());
    Picoseconds sum = 0, until = 0;
    for (const auto& [start, end] : own) {
      sum += std::max<Picoseconds>(0, end - std::max(start, until));
      until = std::max(until, end);
    }
    parts[device] = double(sum) / double(span);
  }
  return parts;
}

std::string role_of(const std::vector<Box>& boxes) {
  bool computes = false, talks = false, alike = true;
  for (const Box& b : boxes) {
    computes |= b.look <= arithmetic;
    talks |= b.look == communication;
    alike &= b.name == boxes[0].name && (b.name == "F" || b.name == "B");
  }
  if (computes || !talks) return computes ? "compute" : boxes.empty() ? "" : "copy";
  return alike ? "comm " + boxes[0].name : "comm";
}

Picture arrange(const std::vector<Operation>& operations) {
  Picture p;
  if (operations.empty()) return p;
  Picoseconds last = operations[0].end;
  p.first = operations[0].start;
  for (const Operation& o : operations) {
    p.first = std::min(p.first, o.start);
    last = std::max(last, o.end);
    if (step_number(o) < 0) continue;
    const auto step = p.steps.emplace(step_number(o), o.start).first;
    step->second = std::min(step->second, o.start);
  }
  p.span = p.axis = std::max<Picoseconds>(1, last - p.first);
  for (const Operation& o : operations) {
    if (p.rows.empty() || p.rows.back().device != o.device || p.rows.back().stream != o.stream)
      p.rows.push_back({o.device, o.stream, "", {}});
    add(p.rows.back(), box_of(o), p.span);
  }
  // A stream in which nothing takes time is left out, but no GPU is.
  std::set<int> shown;
  for (const Row& row : p.rows)
    if (!row.boxes.empty()) shown.insert(row.device);
  p.rows.erase(std::remove_if(p.rows.begin(), p.rows.end(), [&](const Row& row) {
    return row.boxes.empty() && !shown.insert(row.device).second;
  }), p.rows.end());
  for (Row& row : p.rows) row.role = role_of(row.boxes);
  p.busy = busy_parts(operations, p.span);
  return p;
}

// ---- the axis ------------------------------------------------------------------------------

struct Tick {
  Picoseconds at;
  std::string text;
};

// At round times, at most `most` apart from the one at 0; the last one names the unit.
std::vector<Tick> ticks(Picoseconds span, int most, const char* micro) {
  Picoseconds distance = 1;
  for (int i = 0; span / distance > most; ++i) distance = distance * (i % 3 == 1 ? 5 : 4) / 2;
  const std::pair<double, std::string> units[] = {
      {1e12, "s"}, {1e9, "ms"}, {1e6, std::string(micro) + "s"}, {1e3, "ns"}, {1, "ps"}};
  const auto* unit = units;
  while (unit->first > double(span) / 2 && unit->first > 1) ++unit;
  std::vector<Tick> all;
  for (Picoseconds t = 0; t <= span; t += distance)
    all.push_back({t, format("%g", double(t) / unit->first)});
  all.back().text += " " + unit->second;
  return all;
}

// ---- SVG -----------------------------------------------------------------------------------

constexpr double left = 128, right = 930, row_gap = 2, gpu_gap = 9, top = 50;

double height_of(const Row& row, bool low) {
  return row.role == "compute" ? (low ? 15 : 24) : (low ? 6 : 15);
}

const struct {
  const char *fill, *dark, *text, *legend;
} looks[] = {{"#9cc7ee", "#9cc7ee", "#000", "forward"},
             {"#1f5fa8", "#1f5fa8", "#fff", "backward"},
             {"#fff", "#000", "#000", "other compute"},
             {"url(#lines)", "#d9650a", "#000", "communication"},
             {"url(#dots)", "#2c7a2c", "#000", "copy"}};

const char patterns[] =
    "<defs><pattern id='lines' width='7' height='7' patternUnits='userSpaceOnUse' "
    "patternTransform='rotate(45)'><rect width='7' height='7' fill='#ffdcae'/>"
    "<rect width='2.6' height='7' fill='#d9650a'/></pattern>\n"
    "<pattern id='dots' width='6' height='6' patternUnits='userSpaceOnUse'>"
    "<rect width='6' height='6' fill='#e9f5e4'/><circle cx='3' cy='3' r='1.5' fill='#2c7a2c'/>"
    "</pattern></defs>\n";

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') out += "&lt;";
    else if (c == '&') out += "&amp;";
    else if (static_cast<unsigned char>(c) >= ' ') out += c;
  }
  return out;
}

std::string write_at(double x, double y, double size, const char* anchor, const std::string& text,
                     const std::string& more = "") {
  return format("<text x='%.2f' y='%.2f' font-size='%.1f' text-anchor='%s'%s>", x, y, size, anchor,
                more.c_str()) + escaped(text) + "</text>\n";
}

// What is too thin for its pattern has its darkest colour.
std::string rectangle(double x, double y, double width, double height, Look look,
                      const std::string& title) {
  const bool thin = width < 2.5;
  const char* edge = thin ? "" : look == arithmetic ? " stroke='#000'" : " stroke='#fff'";
  return format("<rect x='%.2f' y='%.2f' width='%.2f' height='%.2f' fill='%s' stroke-width='.7'"
                "%s>", x, y, width, height, thin ? looks[look].dark : looks[look].fill, edge) +
         "<title>" + escaped(title) + "</title></rect>\n";
}

std::string title_of(const Box& b, const Picture& p) {  // seen under the pointer
  return b.label() + format(": %g to %g us", double(b.start - p.first) * 1e-6,
                            double(b.end - p.first) * 1e-6);
}

// The label if it fits, else its number, else the number's digits one above the other, else
// nothing. A character is taken as 0.64 times as wide as the font is high.
std::string label_in(const Box& b, double x, double y, double width, double height) {
  if (height < 10) return "";
  const double middle = x + width / 2, wide = 0.64;
  const auto size = [&](const std::string& text) { return (width - 1) / (wide * text.size()); };
  std::string more = format(" fill='%s'", looks[b.look].text);
  if (b.look >= communication) more += " stroke='#fff' stroke-width='3' paint-order='stroke'";
  for (const std::string& text : {b.label(), b.number}) {
    const double margin = text == b.number ? 0.5 : -1;
    const double fits = std::min(height < 20 ? 11.0 : 13.0, size(text) + margin);
    const double least = text.size() == 1 ? 8 : text == b.number ? 10 : 11;
    if (!text.empty() && fits >= least)
      return write_at(middle, y + height / 2 + 0.36 * fits, fits, "middle", text, more);
  }
  const double high = std::min(12.0, size("0") + 0.5);
  if (b.number.size() != 2 || b.number[1] == '\'' || high < 8 || height < 20) return "";
  return write_at(middle, y + 11, high, "middle", b.number.substr(0, 1), more) +
         write_at(middle, y + 21.5, high, "middle", b.number.substr(1), more);
}

std::string legend(const Picture& p, bool whole) {
  std::set<Look> present;
  if (whole) present = {forward, backward, arithmetic, communication};
  for (const Row& row : p.rows)
    for (const Box& b : row.boxes) present.insert(b.look);
  std::string out;
  double x = left;
  for (const Look look : present) {
    out += rectangle(x, 6, 26, 16, look, looks[look].legend);
    out += write_at(x + 32, 19, 14, "start", looks[look].legend);
    x += 60 + 7.6 * std::strlen(looks[look].legend);
  }
  return out + write_at(994, 19, 14, "end", "busy");
}

std::string axis(const Picture& p, double bottom) {
  const double scale = (right - left) / double(p.axis);
  std::string out;
  double free = 0;
  for (const auto& [number, at] : p.steps) {
    const double x = left + double(at - p.first) * scale;
    if (x < free) continue;  // updates that workers begin on their own may lie close together
    free = x + 62;
    out += format("<path d='M%.2f %.2fV%.2f' stroke='#000' stroke-dasharray='4 3'/>\n", x, top - 14,
                  bottom);
    out += write_at(x + 4, top - 5, 13, "start", "step " + std::to_string(number));
  }
  out += format("<path d='M%.2f %.2fH%.2f' stroke='#000'/>\n", left, bottom, right);
  for (const Tick& t : ticks(p.axis, 8, "\u00b5")) {
    const double x = left + double(t.at) * scale;
    out += format("<path d='M%.2f %.2fv5' stroke='#000'/>\n", x, bottom);
    out += write_at(x, bottom + 20, 14, "middle", t.text);
  }
  return out;
}

// ---- text ----------------------------------------------------------------------------------

constexpr int columns = 80, before = 15, after = 5, wide = columns - before - after;

// As much of the label as there is room for; then what it is, to the end of the box.
std::string cells(const Box& b, int width) {
  const char fill = b.look == communication ? '=' : b.look == copying ? '~' : '-';
  const auto initial = static_cast<char>(std::toupper(static_cast<unsigned char>(b.name[0])));
  std::string text = b.label();
  if (b.name.size() == 1 || static_cast<int>(text.size()) >= width) text = initial + b.number;
  if (static_cast<int>(text.size()) > width) text = initial;
  return text + std::string(width - text.size(), fill);
}

std::string line(const Row& row, const Picture& p) {
  std::string out(wide, '.');
  const auto column = [&](Picoseconds t) {
    return static_cast<int>(double(t - p.first) * wide / double(p.span) + 0.5);
  };
  for (const bool thin : {true, false})  // what is thinner than a column shows where all is idle
    for (const Box& b : row.boxes) {
      const int from = std::min(column(b.start), wide - 1), width = column(b.end) - from;
      if (thin != (width <= 0)) continue;
      const std::string text = cells(b, std::max(1, width));
      out.replace(from, text.size(), text);
    }
  return out;
}

std::string text_axis(const Picture& p) {
  std::string out(columns, ' ');
  for (const Tick& t : ticks(p.span, 5, "u")) {
    const size_t at = before + size_t(double(t.at) * wide / double(p.span));
    out.replace(std::min(at, columns - t.text.size()), t.text.size(), t.text);
  }
  return out.substr(0, out.find_last_not_of(' ') + 1) + "\n";
}

std::string text_legend(const Picture& p) {
  std::map<char, std::set<std::string>> names;
  for (const Row& row : p.rows)
    for (const Box& b : row.boxes) names[cells(b, 1)[0]].insert(b.name);
  std::string out, now = "-compute =communication ~copy .idle;";
  for (const auto& [initial, all] : names) {
    std::string entry = format(" %c:", initial);
    for (const std::string& name : all) entry += (entry.back() == ':' ? " " : ", ") + name;
    if (now.size() + entry.size() > columns) out += std::exchange(now, "") + "\n";
    now += entry;
  }
  return out + now + "\n";
}

}  // namespace

int64_t step_number(const Operation& o) {
  if (!*o.step) return -1;
  char* end = nullptr;
  const char* digits = o.step + std::strlen("step ");
  const int64_t number = std::strtoll(digits, &end, 10);
  return end == digits || *end ? -1 : number;
}

std::string draw_svg(const std::vector<Operation>& operations, Picoseconds least) {
  Picture p = arrange(operations);
  p.axis = std::max(p.axis, least);
  const bool low = least > 0;  // many are to be stacked
  const double scale = (right - left) / double(p.axis), size = low ? 13 : 17;
  std::string body;
  double y = top;
  const Row* previous = nullptr;
  for (const Row& row : p.rows) {
    if (!previous || previous->device != row.device) {
      y += previous ? (low ? 4 : gpu_gap) : 0;
      const auto heading = [&](double x, const char* anchor, const std::string& text) {
        body += write_at(x, y + size * 1.06, size, anchor, text, " font-weight='bold'");
      };
      heading(6, "start", "GPU " + std::to_string(row.device));
      heading(994, "end", format("%.0f %%", 100 * p.busy.at(row.device)));
    }
    const double height = height_of(row, low);
    if (!low) body += write_at(left - 6, y + height / 2 + 4, 12, "end", row.role);
    body += format("<rect x='%.2f' y='%.2f' width='%.2f' height='%.2f' fill='#ececec'/>\n", left, y,
                   double(p.span) * scale, height);
    for (const Box& b : row.boxes) {
      const double x = left + double(b.start - p.first) * scale;
      const double width = double(b.end - b.start) * scale;
      body += rectangle(x, y, width, height, b.look, title_of(b, p));
      body += label_in(b, x, y, width, height);
    }
    y += height + (low ? 1 : row_gap);
    previous = &row;
  }
  const double height = y + 4 + 30;
  return format("<svg xmlns='http://www.w3.org/2000/svg' width='1000' height='%.0f' "
                "viewBox='0 0 1000 %.0f' font-family='Helvetica, Arial, sans-serif'>\n"
                "<rect width='1000' height='%.0f' fill='#fff'/>\n", height, height, height) +
         patterns + legend(p, low) + "<!-- rows -->\n" + body + "<!-- axis -->\n" +
         axis(p, y + 4) + "</svg>\n";
}

std::string draw_text(const std::vector<Operation>& operations) {
  const Picture p = arrange(operations);
  std::string out;
  int shown = -1;
  for (const Row& row : p.rows) {
    const bool first = row.device != std::exchange(shown, row.device);
    out += format("%-7s%-7s ", first ? format("GPU %d", row.device).c_str() : "",
                  row.role.c_str()) + line(row, p);
    out += first ? format("%4.0f%%\n", 100 * p.busy.at(row.device)) : "\n";
  }
  return out + text_axis(p) + text_legend(p);
}

}  // namespace virtual_gpu
