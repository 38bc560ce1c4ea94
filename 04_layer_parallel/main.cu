#include "../common/chapter.cuh"
#include "train.cuh"

int main(int argc, char** argv) {
  return chapter_main<ch04::Settings>(
      argc, argv,
      {.name = "04_layer_parallel",
       .title = "layer parallelism, the layers on different GPUs",
       .train = ch04::train,
       .tolerance = bit_for_bit,
       .refuse = [](const auto& settings, const auto& shape) {
         stage_layers(shape, settings.gpus);
       }});
}
