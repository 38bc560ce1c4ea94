#include "../common/chapter.cuh"

namespace {

void refuse(const ch01::Settings& settings, const Shape&) {
  if (settings.gpus != 1)
    throw BadInput("--gpus: " + std::to_string(settings.gpus) + " given, this chapter uses 1");
}

}  // namespace

int main(int argc, char** argv) {
  return chapter_main<ch01::Settings>(argc, argv,
                                      {.name = "01_single_gpu",
                                       .title = "mini-batch SGD on one GPU",
                                       .train = ch01::train,
                                       .tolerance = bit_for_bit,
                                       .refuse = refuse});
}
