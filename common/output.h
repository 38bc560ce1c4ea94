// What a run leaves behind: the host's own forward pass, .safetensors, and JSON. Plain C++.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "idx.h"
#include "options.h"

// ---- accuracy -----------------------------------------------------------------------------

// In double and in plain loops, so that it owes nothing to the kernels that it judges. Eight
// lanes let the compiler vectorise the sum.
template <class A, class B>
double dot(const A* a, const B* b, int n) {
  double lane[8] = {};
  int i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; ++j) lane[j] += double(a[i + j]) * double(b[i + j]);
  for (; i < n; ++i) lane[0] += double(a[i]) * double(b[i]);
  return std::accumulate(lane, lane + 8, 0.0);
}

// How many samples the network puts into their own class (the first of equal logits counts).
inline int64_t count_correct(const Shape& shape, const std::vector<real>& weights,
                             const Dataset& data) {
  int64_t correct = 0;
  std::vector<double> x, y;
  for (int64_t i = 0; i < data.size(); ++i) {
    const uint8_t* pixels = &data.pixels[i * data.features];
    x.assign(pixels, pixels + data.features);
    for (double& value : x) value /= 255;
    for (int l = 0; l < shape.layers(); ++l) {
      const int d_in = shape.width[l], d_out = shape.width[l + 1];
      y.resize(d_out);
      for (int j = 0; j < d_out; ++j) {
        y[j] = dot(&weights[shape.weight_at(l) + int64_t{j} * d_in], x.data(), d_in) +
               weights[shape.bias_at(l) + j];
        if (l + 1 < shape.layers()) y[j] = std::max(y[j], 0.0);
      }
      x.swap(y);
    }
    correct += std::max_element(x.begin(), x.end()) - x.begin() == data.labels[i];
  }
  return correct;
}

// ---- files --------------------------------------------------------------------------------

inline std::string destination(const std::string& path) {
  std::error_code error;
  const auto target = std::filesystem::weakly_canonical(path, error);
  return path.empty() || error ? path : target.string();
}
inline bool is_special(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  return std::filesystem::exists(status) && !std::filesystem::is_regular_file(status) &&
         !std::filesystem::is_directory(status);
}

// Whole or not at all: what is being written has another name until it is complete.
inline std::string temporary_name(const std::string& path) {
  return path + "." + std::to_string(getpid()) + ".part";
}

// A link stays a link, and what is no file (a pipe, a device) is written to as it is.
inline void write_file(const std::string& given, const std::string& content) {
  const std::string path = destination(given);
  const std::string temporary = is_special(path) ? path : temporary_name(path);
  std::FILE* file = std::fopen(temporary.c_str(), "wb");
  bool ok = file && std::fwrite(content.data(), 1, content.size(), file) == content.size();
  ok = file && std::fclose(file) == 0 && ok;
  if (ok && (temporary == path || std::rename(temporary.c_str(), path.c_str()) == 0)) return;
  const std::string why = std::strerror(errno);
  if (temporary != path) std::remove(temporary.c_str());
  throw std::runtime_error(path + ": cannot be written: " + why);
}

// Finds out before the training what would otherwise be found out after it.
inline void refuse_unwritable(const std::string& option, const std::string& given) {
  const std::string path = destination(given);
  if (path.empty() || is_special(path)) return;
  struct stat info;
  errno = stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode) ? EISDIR : 0;
  std::FILE* file = errno ? nullptr : std::fopen(temporary_name(path).c_str(), "wb");
  if (!file)
    throw BadInput(option + ": " + path + " cannot be written: " + std::strerror(errno) +
                   "; a file in a folder that exists and is yours would be right");
  std::fclose(file);
  std::remove(temporary_name(path).c_str());
}

// ---- .safetensors -------------------------------------------------------------------------

// Calls visit(name, offset, rows, columns) for each tensor; a bias has columns = 0.
template <class Visit>
void for_each_tensor(const Shape& shape, Visit visit) {
  for (int l = 0; l < shape.layers(); ++l) {
    const std::string layer = "layers." + std::to_string(l);
    visit(layer + ".weight", shape.weight_at(l), shape.width[l + 1], shape.width[l]);
    visit(layer + ".bias", shape.bias_at(l), shape.width[l + 1], 0);
  }
}

// The length of the header in 8 bytes, the header in JSON, the numbers (all little-endian).
inline std::string safetensors(const Shape& shape, const std::vector<real>& weights) {
  std::string header;
  for_each_tensor(shape, [&](const std::string& name, int64_t at, int rows, int columns) {
    const int64_t end = at + int64_t{rows} * std::max(columns, 1);
    header += (header.empty() ? "{\"" : ",\"") + name + "\":{\"dtype\":\"F" +
              std::to_string(8 * sizeof(real)) + "\",\"shape\":[" + std::to_string(rows) +
              (columns ? "," + std::to_string(columns) : "") + "],\"data_offsets\":[" +
              std::to_string(at * sizeof(real)) + "," + std::to_string(end * sizeof(real)) + "]}";
  });
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');  // so that the numbers are aligned
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header +
         std::string(reinterpret_cast<const char*>(weights.data()), weights.size() * sizeof(real));
}

// ---- JSON ---------------------------------------------------------------------------------

inline std::string json(double value) {
  return std::isfinite(value) ? shortest(value) : "null";  // JSON has no NaN
}
inline std::string json(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    char escape[8];
    std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned char>(c));
    if (c == '"' || c == '\\')
      (quoted += '\\') += c;
    else if (static_cast<unsigned char>(c) < ' ')
      quoted += escape;
    else
      quoted += c;
  }
  return quoted + "\"";
}
inline std::string json(const std::vector<double>& values) {
  std::string list;
  for (double value : values) list += (list.empty() ? "" : ", ") + json(value);
  return "[" + list + "]";
}

// An option's value as it is shown, as a number or true or false where it is one.
inline std::string json_of_shown(const std::string& text) {
  double number;
  return text == "true" || text == "false" || (parse(text, number) && std::isfinite(number))
             ? text
             : json(text);
}
