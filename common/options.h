// Command-line options: a table of names bound to members of the settings. A value is taken
// whole or refused with the option's name, the text given and what would be right; nothing is
// guessed. Names are not abbreviated: what is short for one option today may mean two tomorrow.
#pragma once

#include <getopt.h>

#include <charconv>
#include <functional>
#include <limits>

#include "sgd.h"

// The whole text as a number, or false.
template <class T>
bool parse(const std::string& text, T& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end && !text.empty();
}

template <class T>
std::string shortest(T value) {  // the shortest text that reads back as the same number
  char text[64];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

struct Option {
  std::string name, metavar, help, group;       // without a metavar: a flag
  std::function<bool(const std::string&)> set;  // false: the text is not `right`
  std::function<std::string()> show;            // the value now
  std::string right;                            // "a whole number from 1 to 10"
};

class Options {
 public:
  // Options added from here on are listed under this heading.
  void group(const std::string& heading) { group_ = heading; }

  template <class T>
  void integer(const std::string& name, const std::string& metavar, const std::string& help,
               T& value, T least, T most = std::numeric_limits<T>::max()) {
    add({name, metavar, help, group_,
         [=, &value](const std::string& text) {
           T parsed;
           return parse(text, parsed) && parsed >= least && parsed <= most &&
                  (value = parsed, true);
         },
         [=, &value] { return value < least ? "" : std::to_string(value); },
         "a whole number from " + std::to_string(least) + " to " + std::to_string(most)});
  }

  // A number in (least, most), or in [least, most) where least itself is allowed too.
  void number(const std::string& name, const std::string& metavar, const std::string& help,
              double& value, double least, bool least_too, double most, const std::string& right) {
    add({name, metavar, help, group_,
         [=, &value](const std::string& text) {
           double parsed;
           const bool ok = parse(text, parsed) && std::isfinite(parsed) && parsed < most &&
                           (least_too ? parsed >= least : parsed > least);
           return ok && (value = parsed, true);
         },
         [&value] { return shortest(value); }, right});
  }

  // A number above 0, or a word that stands for 0.
  void number_or(const std::string& word, const std::string& name, const std::string& metavar,
                 const std::string& help, double& value) {
    add({name, word + "|" + metavar, help, group_,
         [=, &value](const std::string& text) {
           double parsed = 0;
           const bool number = parse(text, parsed) && std::isfinite(parsed) && parsed > 0;
           const bool ok = text == word || number;
           return ok && (value = parsed, true);
         },
         [=, &value] { return value == 0 ? word : shortest(value); },
         word + " or a number above 0"});
  }

  void text(const std::string& name, const std::string& metavar, const std::string& help,
            std::string& value) {
    add({name, metavar, help, group_,
         [&value](const std::string& text) { return !text.empty() && (value = text, true); },
         [&value] { return value; }, "a path"});
  }

  // on = false: the flag clears the member (--no-shuffle).
  void flag(const std::string& name, const std::string& help, bool& value, bool on = true) {
    add({name, "", help, group_, [&value, on](const std::string&) { return value = on, true; },
         [&value, on] { return value == on ? "true" : "false"; }, ""});
  }

  // One of several words; the n-th stands for the enumerator n.
  template <class E>
  void choice(const std::string& name, const std::vector<std::string>& words,
              const std::string& help, E& value) {
    std::string all;
    for (const std::string& word : words) all += (all.empty() ? "" : "|") + word;
    add({name, all, help, group_,
         [=, &value](const std::string& text) {
           const auto found = std::find(words.begin(), words.end(), text);
           return found != words.end() && (value = E(found - words.begin()), true);
         },
         [=, &value] { return words[static_cast<size_t>(value)]; }, all});
  }

  void widths(const std::string& name, const std::string& metavar, const std::string& help,
              std::vector<int>& value, int most) {
    add({name, metavar, help, group_,
         [=, &value](const std::string& text) {
           std::vector<int> parsed;
           for (size_t at = 0; text != "none" && at <= text.size();) {
             const size_t comma = std::min(text.find(',', at), text.size());
             int width = 0;
             if (!parse(text.substr(at, comma - at), width) || width < 1 || width > most)
               return false;
             parsed.push_back(width);
             at = comma + 1;
           }
           return value = parsed, true;
         },
         [&value] {
           std::string all;
           for (int width : value) all += (all.empty() ? "" : ",") + std::to_string(width);
           return all.empty() ? "none" : all;
         },
         "widths from 1 to " + std::to_string(most) + " with commas between, or none"});
  }

  // False: --help was asked for. A repeated option: the last one holds.
  bool parse_command_line(int argc, char** argv) {
    std::vector<option> table;
    for (const Option& o : all_)
      table.push_back(
          {o.name.c_str(), o.metavar.empty() ? no_argument : required_argument, nullptr, 0});
    table.push_back({"help", no_argument, nullptr, 0});
    table.push_back({});
    opterr = 0;  // the messages are ours
    optind = 1;
    for (;;) {
      const std::string given = optind < argc ? argv[optind] : "";
      const std::string name = given.substr(0, given.find('='));
      int index = 0;
      const int found = getopt_long(argc, argv, "+:", table.data(), &index);
      if (found == -1) break;
      if (found == ':') throw BadInput(name + ": needs a value, " + meant(name));
      if (found == '?' && meant(name).empty() && name != "--help") refuse_unknown(name);
      if (found == '?') throw BadInput(given + ": " + name + " takes no value");
      if (name != std::string("--") + table[index].name) refuse_unknown(name);
      if (index == static_cast<int>(all_.size())) return false;
      const Option& o = all_[index];
      if (!o.set(optarg ? optarg : ""))
        throw BadInput(name + ": \"" + optarg + "\" given, " + o.right + " would be right");
    }
    if (optind < argc)
      throw BadInput(std::string("\"") + argv[optind] +
                     "\": not an option; options start with --, see --help");
    return true;
  }

  std::string help() const {
    std::string text, group = "\n";
    for (const Option& o : all_) {
      if (o.group != group) text += "\n" + (group = o.group) + ":\n";
      std::string left = "  --" + o.name + (o.metavar.empty() ? "" : " " + o.metavar);
      if (left.size() > 33) left += "\n";
      left.resize(left.size() > 33 ? left.size() + 34 : 34, ' ');
      const std::string shown = o.metavar.empty() ? "" : o.show();
      text += left + o.help + (shown.empty() ? "" : " [" + shown + "]") + "\n";
    }
    return text;
  }

  const std::vector<Option>& all() const { return all_; }

 private:
  void add(Option o) { all_.push_back(std::move(o)); }

  std::string meant(const std::string& name) const {
    for (const Option& o : all_)
      if (name == "--" + o.name) return o.metavar.empty() ? "none" : o.metavar + ": " + o.right;
    return "";
  }
  [[noreturn]] void refuse_unknown(const std::string& name) const {
    for (const Option& o : all_)
      if (name.size() > 2 && ("--" + o.name).starts_with(name))
        throw BadInput(name + ": no such option; --" + o.name + " would be right");
    throw BadInput(name + ": no such option, see --help");
  }

  std::vector<Option> all_;
  std::string group_;
};
