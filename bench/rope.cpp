// Registers the benchmarks of the rotary embedding.
#include "rope.hpp"

#include <array>
#include <cmath>
#include <memory>
#include <ssmax/rope.hpp>

#include "copy.hpp"
#include "measure.hpp"

namespace ssmax_bench {
namespace {

struct RopeShape {
  index_t heads;
  index_t width;
  index_t positions;

  std::string name() const {
    return std::string("h") + std::to_string(heads) + "_d" + std::to_string(width) + "_n" +
           std::to_string(positions);
  }
};

// The arrays of one shape, and the tables for the peers.
struct RopeData {
  explicit RopeData(RopeShape shape)
      : in(shape.heads * shape.width * shape.positions, 0),
        out(in.size(), 1),
        cosine(shape.positions * shape.width / 2, 2),
        sine(cosine.size(), 3) {
    fill_normal(in, 3);
    const index_t half = shape.width / 2;
    for (index_t position = 0; position < shape.positions; ++position) {
      for (index_t i = 0; i < half; ++i) {
        const double frequency =
            std::pow(10'000.0, -2.0 * static_cast<double>(i) / static_cast<double>(shape.width));
        const double angle = static_cast<double>(position) * frequency;
        cosine.data()[position * half + i] = static_cast<float>(std::cos(angle));
        sine.data()[position * half + i] = static_cast<float>(std::sin(angle));
      }
    }
  }

  Buffer in;
  Buffer out;
  Buffer cosine;
  Buffer sine;
};

Implementation<RopeArguments> our_rope(const std::string& name, ssmax::Pairing pairing) {
  return {name,
          [pairing](const RopeArguments& a) -> Run {
            const auto table = std::make_shared<const ssmax::Rope<float>>(
                ssmax::RopeOptions{.width = a.width, .pairing = pairing}, a.positions);
            const std::array<index_t, 3> extents{a.heads, a.positions, a.width};
            return [table, in = ssmax::View<const float, 3>(a.x, extents),
                    out = ssmax::View<float, 3>(a.y, extents)] { ssmax::rope<float>(in, out, *table, 0); };
          },
          compare_rope};
}

void register_shape(RopeShape shape) {
  const auto data = std::make_shared<std::unique_ptr<RopeData>>();
  const auto arguments = [shape, data](RopePairing pairing) {
    if (*data == nullptr) *data = std::make_unique<RopeData>(shape);
    const RopeData& d = **data;
    return RopeArguments{shape.heads,     shape.width,   shape.positions, d.in.data(),
                         d.cosine.data(), d.sine.data(), d.out.data(),    pairing};
  };
  const index_t elements = shape.heads * shape.width * shape.positions;
  const auto add = [&](const Implementation<RopeArguments>& implementation, RopePairing pairing) {
    add_benchmark<RopeArguments>(
        "rope", shape.name(), implementation, [=] { return arguments(pairing); },
        nanoseconds_per_element(elements));
  };

  add(our_rope("rope_half", ssmax::Pairing::half_split), RopePairing::half_split);
  add(our_rope("rope_interleaved", ssmax::Pairing::interleaved), RopePairing::interleaved);
  add({"copy", [](const RopeArguments& a) -> Run { return [a] { copy(a.x, a.y, a.size()); }; },
       [](const RopeArguments&) { return Accuracy{}; },
       [](const RopeArguments& a) { return copy_kind(a.size()); }},
      RopePairing::half_split);
  // A peer's name without a suffix stands for the half-split pairing, as in most models.
  for (const LoadedPeer& peer : peers()) {
    if (peer.peer == nullptr) continue;
    for (const RopePairing pairing : {RopePairing::half_split, RopePairing::interleaved}) {
      if (!peer.peer->rope({0, 2, 0, nullptr, nullptr, nullptr, nullptr, pairing})) continue;
      const std::string suffix = pairing == RopePairing::half_split ? "" : "_interleaved";
      add({peer.name + suffix, [p = peer.peer](const RopeArguments& a) { return p->rope(a); }, compare_rope},
          pairing);
    }
  }
}

}  // namespace

void register_rope() {
  register_shape({12, 64, 1024});
  register_shape({8, 128, 4096});
}

}  // namespace ssmax_bench
