#include "train.cuh"

#include "../common/chapter.cuh"

// A rank without a unit would wait at every sum for nothing.
static void refuse(const ch05::Settings& settings, const Shape& shape) {
  for (int l = 0; l <= shape.layers(); ++l) {
    const std::string units = std::to_string(shape.width[l]);
    if (is_split(l) && shape.width[l] < settings.gpus)
      throw BadInput("--gpus: " + std::to_string(settings.gpus) + " ranks cannot share the " +
                     units + " output units of layer " + std::to_string(l - 1) + "; at most " +
                     units + " ranks, or a larger " +
                     (l < shape.layers() ? "--hidden" : "--classes") + " would be right");
  }
}

int main(int argc, char** argv) {
  return chapter_main<ch05::Settings>(argc, argv,
                                      {.name = "05_tensor_parallel",
                                       .title = "one layer's matrix on several GPUs",
                                       .train = ch05::train,
                                       .refuse = refuse});
}
