// Who owns which units when layers are split over p ranks (tensor parallelism), in plain C++.
// Odd widths are split, even ones are whole on every rank. Layer l maps width l to width l + 1,
// so even layers have some of the output units (rows of W [d_out, d_in], columns of W^T) with all
// inputs, and odd layers some of the input units with all outputs.
#pragma once

#include "sgd.h"

inline bool is_split(int l) { return l % 2 == 1; }   // width l
inline bool is_row(int l) { return is_split(l); }    // layer l reads split units
inline bool is_column(int l) { return !is_row(l); }  // layer l makes split units

// The units of width l that rank r of p has.
inline Share units(const Shape& shape, int l, int r, int p) {
  return is_split(l) ? share(shape.width[l], r, p) : Share{0, shape.width[l]};
}

// The network as rank r sees it: its number of units in each width. Its parameters are one flat
// buffer of their own, layer by layer, weight [local d_out, local d_in] then bias [local d_out].
inline Shape shard(const Shape& shape, int r, int p) {
  Shape local = shape;
  for (int l = 0; l <= shape.layers(); ++l)
    local.width[l] = static_cast<int>(units(shape, l, r, p).size());
  return local;
}

// The shard in runs that are contiguous both there and in the whole: visit(at, l, i, n) for the
// shard's elements at .. at + n - 1, which in layer l's parameters (weight then bias) are the
// i-th and following.
template <class Visit>
void visit_shard(const Shape& shape, int r, int p, Visit visit) {
  int64_t at = 0;
  for (int l = 0; l < shape.layers(); ++l) {
    const Share in = units(shape, l, r, p), out = units(shape, l + 1, r, p);
    for (int64_t j = out.first; j < out.last; ++j, at += in.size())
      visit(at, l, j * shape.width[l] + in.first, in.size());
    visit(at, l, shape.weight_size(l) + out.first, out.size());
    at += out.size();
  }
}

// As initial_parameters(), of the shard alone: a weight's value depends on its place in the whole.
inline void initial_shard(const Shape& shape, uint64_t seed, int r, int p,
                          std::vector<real>& flat) {
  flat.assign(shard(shape, r, p).parameters(), 0);  // biases stay 0
  visit_shard(shape, r, p, [&](int64_t at, int l, int64_t i, int64_t n) {
    for (const int64_t end = std::min(i + n, shape.weight_size(l)); i < end; ++i, ++at)
      flat[at] = static_cast<real>(initial_weight(seed, l, i, shape.width[l]));
  });
}

// Copies rank r's shard to its places in the whole. A bias that several ranks have is the same on
// all of them.
inline void place_shard(std::vector<real>& whole, const std::vector<real>& flat,
                        const Shape& shape, int r, int p) {
  whole.resize(shape.parameters());
  visit_shard(shape, r, p, [&](int64_t at, int l, int64_t i, int64_t n) {
    std::copy_n(&flat[at], n, &whole[shape.weight_at(l) + i]);
  });
}
