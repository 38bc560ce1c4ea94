// A mesh of D x P x T ranks: who has which place in it, what it can be, and how its parts come
// together at the end. Replica d of D has some rows of each batch, stage p of P some layers, shard
// t of T some units of every odd width. Rank (d P + p) T + t has d, p and t: shards, which talk
// most, are neighbours, and replicas, which talk once an update, are far apart.
#pragma once

#include "pipeline.cuh"
#include "shard.h"

struct MeshConfig : PipelineConfig {
  int dp = 0;  // D; 0: as many as P x T leaves
  int pp = 2;  // P
  int tp = 1;  // T
  MeshConfig() { gpus = 8; }
  int replicas() const { return dp ? dp : gpus / pp / tp; }
};

inline void mesh_options(MeshConfig& c, Options& o) {
  o.integer("dp", "D", "replicas that share a batch; not given: all GPUs over PP and TP", c.dp, 1,
            1 << 20);
  o.integer("pp", "PP", "stages that share the layers", c.pp, 1, 1 << 20);
  o.integer("tp", "TP", "shards that share each layer", c.tp, 1, 1 << 20);
  pipeline_options(c, o);
}

// Throws BadInput where the ranks are not as many as the mesh has places, or a rank would have no
// layer or no unit: it would wait at every sum for nothing. A replica may have no row.
inline void refuse_mesh(const MeshConfig& c, const Shape& shape) {
  const auto text = [](int64_t n) { return std::to_string(n); };
  const int64_t model = int64_t{c.pp} * c.tp, wanted = c.dp ? c.dp * model : model;
  const std::string factors = "--pp " + text(c.pp) + " x --tp " + text(c.tp);
  if (c.dp ? c.gpus != wanted : c.gpus % wanted != 0)
    throw BadInput("--gpus: " + text(c.gpus) + " ranks given, " +
                   (c.dp ? "--dp " + text(c.dp) + " x " + factors + " make " + text(wanted)
                         : factors + " need a multiple of " + text(wanted)));
  if (const int v = c.chunks_on(c.pp); int64_t{c.pp} * v > shape.layers())
    throw BadInput("--pp: " + text(c.pp) + " stages" +
                   (v > 1 ? " of " + text(v) + " --chunks" : "") +
                   " need a layer each, the network has " + text(shape.layers()) +
                   "; fewer or more --hidden would be right");
  refuse_pipeline(c, shape, c.pp);
  for (int l = 0; l <= shape.layers(); ++l)
    if (is_split(l) && shape.width[l] < c.tp)
      throw BadInput("--tp: " + text(c.tp) + " shards cannot share the " + text(shape.width[l]) +
                     " output units of layer " + text(l - 1) + "; at most " +
                     text(shape.width[l]) + ", or a larger " +
                     (l < shape.layers() ? "--hidden" : "--classes") + " would be right");
}

// Replica 0's stages and shards, put together on rank 0's host: no GPU ever holds all of them. All
// ranks call. `mailbox` is rank 0's, as large as its own parameters; `part` is for what is copied.
inline void bring_mesh_to_rank_0(std::vector<real>& all, std::vector<real>& part,
                                 const Buffer<real>& own, const Buffer<real>& mailbox,
                                 const Shape& shape, const Placement& here, int tp, Rank& rank,
                                 cudaStream_t stream) {
  const int64_t most = Placement(shard(shape, 0, tp), here.stages, 0, here.p).local(shape.layers());
  for (int t = 0; t < tp; ++t) {
    const Placement there(shard(shape, t, tp), here.stages, here.r, here.p);
    part.resize(there.shape.parameters());
    for (int s = 0; s < there.count(); ++s)
      bring_to_rank_0(&part[there.begin(s)], own + here.local(here.stages[s].first), there.size(s),
                      s % here.p * tp + t, mailbox.data(), most, rank, stream);
    rank.wait(stream);
    if (rank.rank == 0) place_shard(all, part, shape, t, tp);
  }
}
