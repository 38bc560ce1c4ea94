// Chapter 02: synchronous data parallelism. Base: 01_single_gpu
//
// Split the batch, replicate the model, compute apart, add up the gradients, update everywhere.
// Every rank holds all parameters, their momentum, a whole gradient and the whole data set; of a
// batch's B samples it reads rows [rB/p, (r+1)B/p) only.
//
//   rank 0   rows 0, 1      forward, backward -> gradient of its rows --+
//   rank 1   rows 2, 3, 4   forward, backward -> gradient of its rows --+-- sum --> update each
//   rank 2   rows 5, 6, 7   forward, backward -> gradient of its rows --+           replica alike
//
// Backward gives the last layer's gradient first, so the sum need not wait for the end. Gradients
// go in buckets of whole layers, on a second stream, while backward goes on below them:
//
//   compute         backward 2 | backward 1 | backward 0 | . . wait . | update 2-1 | update 0
//   communication                           | all-reduce 2-1 | all-reduce 0 |
#pragma once

#include "../common/gpu.cuh"
#include "../common/idx.h"
#include "../common/kernels.cuh"
#include "../common/ranks.cuh"
#include "../common/sgd.h"

namespace ch02 {

enum class AllReduce { nccl, star };

struct Settings : Config {
  int64_t bucket_bytes = 16384;            // an all-reduce has at least these; 0: one for all
  AllReduce allreduce = AllReduce::nccl;
};

// Layers `layer` and up to the previous bucket's: [at, at + n) of the gradient.
struct Bucket {
  int layer;
  int64_t at, n;
  Event ready, reduced;
};

// Last layer first. The layer that fills a bucket closes it; layer 0 closes the last one.
inline std::vector<Bucket> plan_buckets(const Shape& shape, int64_t least_bytes) {
  std::vector<Bucket> plan;
  int64_t end = shape.parameters();
  for (int l = shape.layers() - 1; l >= 0; --l) {
    const int64_t at = shape.weight_at(l), bytes = (end - at) * sizeof(real);
    if (l > 0 && (least_bytes == 0 || bytes < least_bytes)) continue;
    plan.push_back({l, at, end - at, {}, {}});
    end = at;
  }
  return plan;
}

// data [n] += the k arrays [n] in inbox, one after the other, so that the bits repeat.
template <class T>
__global__ void add_kernel(T* data, const T* inbox, int64_t n, int k) {
  for (int64_t i = first_index(); i < n; i += grid_stride())
    for (int j = 0; j < k; ++j) data[i] += inbox[j * n + i];
}

class Trainer {
 public:
  Trainer(const Settings& settings, const Dataset& data, Rank& rank)
      : settings(settings), rank(rank), data(data) {
    for (int l = 0; l <= L; ++l) {
      a.emplace_back(int64_t{b} * shape.width[l]);
      da.emplace_back(l == 0 ? 0 : int64_t{b} * shape.width[l]);  // the data needs no gradient
    }
    pixels.upload(data.pixels, compute);
    labels.upload(data.labels, compute);
    order.upload(order_on_host, compute);
  }

  Result train() {
    rank.meet();  // a rank that still allocated could wait for a peer that waits for it
    warm_up();
    initialise();
    start.record(compute);
    for (int64_t t = 0; t < T; ++t) {
      step(t);
      if (rank.progress_is_due(t, T)) rank.progress(t, T, loss_of(t), plan[t].samples);
    }
    stop.record(compute);
    return collect();
  }

 private:
  // ---- one step ----------------------------------------------------------------------------

  void step(int64_t t) {
    Range range("step " + std::to_string(t));
    const Update u = own_rows(plan[t]);
    load(u);
    for (int l = 0; l < L; ++l) forward(l, u.samples);
    compute_loss(t, u.samples, plan[t].samples);
    for (int l = L - 1; l >= 0; --l) {
      backward(l, u.samples);
      all_reduce_if_complete(l);  // new: a bucket goes off as soon as its lowest layer is there
    }
    for (const Bucket& bucket : buckets) update(bucket, u.rate);
  }

  // This rank's part of a batch. It may be empty: the rank then adds zeros to the sums.
  Update own_rows(const Update& u) const {
    const Share rows = share(u.samples, rank.rank, p);
    return {u.first + rows.first, static_cast<int>(rows.size()), u.rate, u.epoch};
  }

  void load(const Update& u) {
    Range range("load");
    load_pixels(a[0].data(), pixels, order + u.first, u.samples, shape.width[0], compute);
    load_labels(label, labels, order + u.first, u.samples, compute);
  }

  void forward(int l, int rows) {
    Range range("forward " + std::to_string(l));
    const int d_in = shape.width[l], d_out = shape.width[l + 1];
    forward_matmul(a[l + 1].data(), a[l].data(), weight(l), rows, d_out, d_in, blas);
    forward_bias(a[l + 1].data(), bias(l), rows, d_out, l < L - 1, compute);
  }

  // Divided by the global batch, not by this rank's rows: then the ranks' sum is the mean, with
  // uneven shares too, and nobody divides again.
  void compute_loss(int64_t t, int rows, int samples) {
    Range range("loss");
    softmax_loss(row_loss.data(), da[L].data(), a[L].data(), label, rows, shape.width[L],
                 1.0 / samples, compute);
    sum(losses + t, row_loss.data(), rows, 1.0 / samples, 0, compute);
  }

  void backward(int l, int rows) {
    Range range("backward " + std::to_string(l));
    const int d_in = shape.width[l], d_out = shape.width[l + 1];
    if (l < L - 1) backward_relu(da[l + 1].data(), a[l + 1].data(), int64_t{rows} * d_out, compute);
    backward_weight(dweight(l), da[l + 1].data(), a[l].data(), rows, d_out, d_in, 0, blas);
    backward_bias(dbias(l), da[l + 1].data(), rows, d_out, 0, compute);
    if (l > 0) backward_input(da[l].data(), da[l + 1].data(), weight(l), rows, d_out, d_in, blas);
  }

  // From `ready` on the bucket is the communication stream's, until `reduced`. All ranks have the
  // same buckets in the same order, whatever samples they have: NCCL would not notice otherwise.
  void all_reduce_if_complete(int l) {
    for (const Bucket& bucket : buckets) {
      if (bucket.layer != l) continue;
      Range range("all-reduce " + std::to_string(l));
      bucket.ready.record(compute);
      communication.wait(bucket.ready);
      if (settings.allreduce == AllReduce::star) star(gradient + bucket.at, bucket.n);
      else rank.world.all_reduce(gradient + bucket.at, bucket.n, communication);
      bucket.reduced.record(communication);
    }
  }

  // The plain way: rank 0 gathers all gradients, adds them and sends everyone the sum. All of it
  // passes rank 0's link, (p-1) n numbers each way; in a ring, 2 (p-1)/p n pass each link.
  void star(real* bucket, int64_t n) {
    const int peers = rank.rank == 0 ? p - 1 : 1;  // 1, 2, ... for rank 0, and rank 0 for them
    {
      Group gather;
      for (int i = 0; i < peers; ++i)
        if (rank.rank > 0) rank.world.send(bucket, n, 0, communication);
        else rank.world.recv(inbox + i * n, n, i + 1, communication);
    }
    if (rank.rank == 0) launch(communication, n, add_kernel<real>, bucket, inbox.data(), n, p - 1);
    Group spread;
    for (int i = 0; i < peers; ++i)
      if (rank.rank > 0) rank.world.recv(bucket, n, 0, communication);
      else rank.world.send(bucket, n, i + 1, communication);
  }

  // Waits for this bucket alone; those after it may still be on their way. The next backward
  // overwrites the gradient only after this, on the same stream.
  void update(const Bucket& bucket, double rate) {
    Range range("update " + std::to_string(bucket.layer));
    compute.wait(bucket.reduced);
    update_sgd(parameters + bucket.at, velocity + bucket.at, gradient + bucket.at, bucket.n, rate,
               settings.momentum, compute);
  }

  // ---- before and after the loop -----------------------------------------------------------

  // Every rank makes the same parameters. The broadcast makes sure of it: replicas that start
  // apart stay apart, for all of them add the same updates.
  void initialise() {
    initial_parameters(shape, settings.seed, parameters_on_host);
    parameters.upload(parameters_on_host, compute);
    rank.world.broadcast(parameters.data(), parameters.size(), 0, compute);
    velocity.zero(compute);
    rank.wait(compute);
    rank.world.traffic = {};  // the report is of the steps
  }

  // The first use of a kernel or a matrix shape loads code and allocates. One step before the
  // clock starts gets that over with; initialise() then undoes what it did. A short last batch
  // gets one too, for a rank may have rows of it and none of the others.
  void warm_up() {
    Range range("warm-up");  // its steps are none of the timeline's
    initialise();
    for (int64_t t = 0; t < T && plan[t].epoch == 0; ++t)
      if (t == 0 || plan[t].samples < plan[0].samples) step(t);
    rank.wait(compute);
  }

  // Adds up the ranks' losses of the updates since the last call. `compute` has waited for every
  // bucket, so nothing else is on the communicator.
  void sum_losses(int64_t end) {
    const Traffic of_the_steps = rank.world.traffic;
    rank.world.all_reduce(losses + summed, end - summed, compute);
    rank.world.traffic = of_the_steps;
    summed = end;
  }

  double loss_of(int64_t t) {
    sum_losses(t + 1);
    real& value = losses_on_host[t];
    rank.wait(compute);  // a copy to the host may wait too, but asks after no peer
    CHECK(cudaMemcpyAsync(&value, losses + t, sizeof value, cudaMemcpyDeviceToHost, compute));
    rank.wait(compute);
    return value;
  }

  Result collect() {
    sum_losses(T);
    Result result;
    parameters.download(parameters_on_host.data(), shape.parameters(), compute);
    losses.download(losses_on_host.data(), T, compute);
    rank.wait(compute);
    result.weights = parameters_on_host;
    result.losses.assign(losses_on_host.begin(), losses_on_host.end());
    result.step_seconds = T ? seconds_between(start, stop) / T : 0;
    result.bytes_sent_per_step = T ? rank.world.traffic.bytes / T : 0;
    result.peak_memory = memory_use().peak;
    rank.meet();  // likewise: to free memory early could stop the others' kernels
    return result;
  }

  // ---- state -------------------------------------------------------------------------------

  real* weight(int l) { return parameters + shape.weight_at(l); }   // [d_l+1, d_l]
  real* bias(int l) { return parameters + shape.bias_at(l); }       // [d_l+1]
  real* dweight(int l) { return gradient + shape.weight_at(l); }    // [d_l+1, d_l]
  real* dbias(int l) { return gradient + shape.bias_at(l); }        // [d_l+1]

  const Settings& settings;
  Rank& rank;
  const Dataset& data;
  const Shape shape = network(settings, data.features);
  const int L = shape.layers(), B = largest_batch(settings, data.size()), p = rank.size;
  const int b = (B - 1) / p + 1;                              // a rank's rows of a batch, at most
  const std::vector<Update> plan = updates(settings, data.size());  // what each step reads
  const int64_t T = static_cast<int64_t>(plan.size());
  const std::vector<int32_t> order_on_host = sample_order(settings, data.size());
  // What is copied to the host outlives the streams: a wait that fails leaves the copy under way.
  std::vector<real> parameters_on_host, losses_on_host = std::vector<real>(T);
  int64_t summed = 0;  // of how many updates `losses` holds the global batch's

  Stream compute, communication;
  Blas blas{compute};
  Event start, stop;
  const std::vector<Bucket> buckets = plan_buckets(shape, settings.bucket_bytes);
  Buffer<uint8_t> pixels{data.size() * data.features};        // [N, d_0]
  Buffer<int32_t> labels{data.size()};                        // [N]
  Buffer<int32_t> order{(int64_t)order_on_host.size()};       // [samples of all updates]
  Buffer<real> parameters{shape.parameters()};                // [P], layer by layer: W, b
  Buffer<real> gradient{shape.parameters()};                  // [P], of own rows, then the sum
  Buffer<real> velocity{shape.parameters()};                  // [P], the momentum
  Buffer<real> inbox{settings.allreduce == AllReduce::star && rank.rank == 0
                         ? (p - 1) * std::ranges::max_element(buckets, {}, &Bucket::n)->n
                         : 0};                                // [p-1, largest bucket]
  std::vector<Buffer<real>> a, da;                            // a[l], da[l]: [b, d_l]
  Buffer<int32_t> label{b};                                   // [b]
  Buffer<real> row_loss{b};                                   // [b]
  Buffer<real> losses{T};                                     // [T], mean loss of each update
};

inline Result train(const Settings& settings, const Dataset& data, Rank& rank) {
  return Trainer(settings, data, rank).train();
}

}  // namespace ch02
