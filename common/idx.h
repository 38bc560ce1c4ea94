// The data set: four files in the IDX format of MNIST, plain or .gz.
//   images: 00 00 08 03, count, rows, columns (big-endian 32 bits), then a byte a pixel
//   labels: 00 00 08 01, count,                                     then a byte a label
// A file is used exactly as it is, or refused with its path, what was found and what is right.
#pragma once

#include <sys/stat.h>
#include <zlib.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <memory>

#include "sgd.h"

struct Dataset {
  int rows = 0, columns = 0, features = 0;  // features = rows * columns, d_0
  std::vector<uint8_t> pixels;              // [N, d_0]
  std::vector<int32_t> labels;              // [N]
  int64_t size() const { return static_cast<int64_t>(labels.size()); }
};

struct Data {
  Dataset train, test;
};

// One IDX file, its header checked against its true size before anything is allocated for it.
class IdxFile {
 public:
  // Looks for `path` and `path`.gz.
  IdxFile(const std::string& path, int dimensions) : path_(path) {
    struct stat info;
    const bool gz = stat(path_.c_str(), &info) != 0 && errno == ENOENT;
    if (gz) path_ += ".gz";
    if (stat(path_.c_str(), &info) != 0) {
      if (errno != ENOENT) refuse(std::string("cannot be read: ") + std::strerror(errno));
      throw BadInput(path + ": no such file, nor " + path_ +
                     "; a data set is train-images-idx3-ubyte, train-labels-idx1-ubyte, "
                     "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, plain or .gz");
    }
    if (!S_ISREG(info.st_mode)) refuse("is not a regular file, an IDX file would be right");
    file_.reset(gzopen(path_.c_str(), "rb"));
    if (!file_) refuse(std::string("cannot be read: ") + std::strerror(errno));
    const bool compressed = info.st_size > 0 && !gzdirect(file_.get());
    if (compressed && !gz)
      refuse("looks gzip-compressed (starts 1f 8b); unpack it first, or name it .gz");
    if (gz && !compressed) refuse("is not gzip-compressed (does not start 1f 8b), as .gz says");
    read_header(dimensions);
  }

  const std::string& path() const { return path_; }
  int64_t size(int dimension) const { return size_[dimension]; }
  std::vector<uint8_t> content() {
    std::vector<uint8_t> bytes(size_[0] * size_[1] * size_[2]);
    if (read(bytes.data(), bytes.size()) != static_cast<int64_t>(bytes.size()))
      refuse("became shorter while it was read");
    return bytes;
  }
  [[noreturn]] void refuse(const std::string& what) const { throw BadInput(path_ + ": " + what); }

 private:
  void read_header(int dimensions) {
    const int header_size = 4 + 4 * dimensions;
    uint8_t header[16] = {};
    const int64_t found = true_size();
    if (found < header_size)
      refuse("has " + std::to_string(found) + " bytes, its header alone takes " +
             std::to_string(header_size));
    read(header, header_size);
    const uint32_t magic = big_endian(header), right = 0x800 + dimensions;
    if (magic != right) {
      char text[100];
      std::snprintf(text, sizeof text, "starts %08x, IDX with %d dimension%s of bytes starts %08x",
                    magic, dimensions, dimensions > 1 ? "s" : "", right);
      refuse(text);
    }
    for (int i = 0; i < dimensions; ++i) size_[i] = big_endian(header + 4 + 4 * i);
    if (size_[0] == 0) refuse("holds 0 samples, at least 1 is needed");
    if (size_[1] == 0 || size_[2] == 0 || size_[1] > INT_MAX / size_[2])
      refuse("says that its images are " + std::to_string(size_[1]) + " x " +
             std::to_string(size_[2]) + " pixels, 1 to 2147483647 in all would be right");
    if (size_[0] > INT_MAX) refuse("holds " + std::to_string(size_[0]) + " samples, too many");
    const int64_t expected = header_size + size_[0] * size_[1] * size_[2];
    if (found != expected)
      refuse("has " + std::to_string(found) + " bytes, its header promises " +
             std::to_string(expected));
  }

  // The number of bytes behind the header is known only by reading to the end where the file is
  // compressed, so that is how it is found in any case.
  int64_t true_size() {
    std::vector<uint8_t> chunk(1 << 16);
    int64_t total = 0;
    while (const int64_t n = read(chunk.data(), chunk.size())) total += n;
    gzrewind(file_.get());
    return total;
  }

  // Reads up to n bytes; fewer only at the end of the file.
  int64_t read(uint8_t* to, size_t n) {
    const size_t got = gzfread(to, 1, n, file_.get());
    int status = Z_OK;
    const char* message = gzerror(file_.get(), &status);
    if (status == Z_BUF_ERROR) message = "the compressed data is truncated";
    if (status == Z_ERRNO) message = std::strerror(errno);
    if (got < n && status != Z_OK && status != Z_STREAM_END)
      refuse(std::string("cannot be read: ") + message);
    return static_cast<int64_t>(got);
  }

  static uint32_t big_endian(const uint8_t* b) {
    return uint32_t{b[0]} << 24 | uint32_t{b[1]} << 16 | uint32_t{b[2]} << 8 | b[3];
  }

  struct Close {
    void operator()(gzFile file) const { gzclose(file); }
  };
  std::string path_;
  std::unique_ptr<gzFile_s, Close> file_;
  int64_t size_[3] = {1, 1, 1};
};

inline Dataset load_part(const std::string& images_path, const std::string& labels_path,
                         int classes) {
  IdxFile images(images_path, 3), labels(labels_path, 1);
  if (images.size(0) != labels.size(0))
    labels.refuse("has " + std::to_string(labels.size(0)) + " labels for the " +
                  std::to_string(images.size(0)) + " images of " + images.path());
  Dataset part;
  part.rows = static_cast<int>(images.size(1));
  part.columns = static_cast<int>(images.size(2));
  part.features = part.rows * part.columns;
  part.pixels = images.content();
  const std::vector<uint8_t> bytes = labels.content();
  part.labels.assign(bytes.begin(), bytes.end());
  for (int64_t i = 0; i < part.size(); ++i)
    if (part.labels[i] >= classes)
      labels.refuse("label " + std::to_string(i) + " is " + std::to_string(part.labels[i]) +
                    ", with --classes " + std::to_string(classes) + " the largest is " +
                    std::to_string(classes - 1));
  return part;
}

inline Data load(const std::string& dir, int classes) {
  Data data;
  data.train =
      load_part(dir + "/train-images-idx3-ubyte", dir + "/train-labels-idx1-ubyte", classes);
  data.test = load_part(dir + "/t10k-images-idx3-ubyte", dir + "/t10k-labels-idx1-ubyte", classes);
  if (data.test.rows != data.train.rows || data.test.columns != data.train.columns)
    throw BadInput(dir + ": the test images are " + std::to_string(data.test.rows) + " x " +
                   std::to_string(data.test.columns) + " pixels, the training images " +
                   std::to_string(data.train.rows) + " x " + std::to_string(data.train.columns));
  return data;
}
