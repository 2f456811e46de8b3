// Attention of training over the ranks of MPI. Each rank computes some of the heads at all positions, and
// all ranks get the result. All ranks do the other work with the same numbers. Results are bit-identical to
// attention_in_one_process.cpp.
#include <cstdint>
#include <numeric>
#include <ssmax/mpi.hpp>
#include <stdexcept>

#include "attention_views.hpp"
#include "files.hpp"

namespace longcontext {

namespace {

// Returns the communicator. The first call is collective. The communicator lives until MPI is finalised.
ssmax::mpi::Communicator& ranks() {
  static ssmax::mpi::Communicator comm(MPI_COMM_WORLD);
  return comm;
}

// The positions of one rank: it passes the rows of these positions, of every head, and gets their results.
class Share {
 public:
  explicit Share(const HeadShape& whole)
      : layout_(ssmax::mpi::Layout::contiguous(whole.length, ranks().ranks(), 1).by_heads()),
        shape_(whole),
        rows_(static_cast<std::size_t>(layout_.ranks())) {
    for (int r = 0; r < layout_.ranks(); ++r) {
      rows_[static_cast<std::size_t>(r)] = static_cast<int>(layout_.count(r));
    }
    first_rows_.resize(rows_.size());
    std::exclusive_scan(rows_.begin(), rows_.end(), first_rows_.begin(), 0);
    shape_.length = rows_[static_cast<std::size_t>(ranks().rank())];
  }

  const ssmax::mpi::Layout& layout() const { return layout_; }
  const HeadShape& shape() const { return shape_; }
  // Returns this rank's rows of a matrix of all tokens, starting at a column.
  ssmax::View<float, 4> of(Matrix& tokens, index_t column = 0) const {
    const index_t first_row = first_rows_[static_cast<std::size_t>(ranks().rank())];
    return by_heads(tokens, shape_, first_row * tokens.cols() + column);
  }
  // Sends this rank's rows to all ranks and receives the rows of all others.
  void gather(Matrix& tokens) const {
    MPI_Datatype row = MPI_DATATYPE_NULL;
    MPI_Type_contiguous(static_cast<int>(tokens.cols()), MPI_FLOAT, &row);
    MPI_Type_commit(&row);
    MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, tokens.data(), rows_.data(), first_rows_.data(), row,
                   MPI_COMM_WORLD);
    MPI_Type_free(&row);
  }

 private:
  ssmax::mpi::Layout layout_;
  HeadShape shape_;
  std::vector<int> rows_, first_rows_;  // [ranks]
};

// Throws if ranks have different numbers, as with another text, another checkpoint or a processor that
// rounds differently.
void check_same_everywhere(const Matrix& tokens) {
  const auto* last = reinterpret_cast<const char*>(tokens.row(tokens.rows() - 1).data());
  const std::uint64_t here = checksum({last, static_cast<std::size_t>(tokens.cols()) * sizeof(float)});
  std::uint64_t extremes[2] = {here, ~here};
  MPI_Allreduce(MPI_IN_PLACE, extremes, 2, MPI_UINT64_T, MPI_MAX, MPI_COMM_WORLD);
  if (extremes[0] != ~extremes[1]) {
    throw std::runtime_error(
        "ranks have come to different numbers: text, options, checkpoint and processor must be the same");
  }
}

}  // namespace

void attend(const HeadShape& shape, const Scaling& scaling, const ssmax::Rope<float>& rope, Matrix& qkv,
            Matrix& heads, Matrix& lse) {
  check_same_everywhere(qkv);
  const Share share(shape);
  heads.resize(qkv.rows(), shape.width());
  lse.resize(shape.heads, share.shape().length);
  const auto attend_with = [&](const auto& with) {
    ssmax::mpi::attention(ranks(), share.layout(),
                          {.q = share.of(qkv),
                           .k = share.of(qkv, shape.width()),
                           .v = share.of(qkv, 2 * shape.width()),
                           .out = share.of(heads),
                           .lse = lse_view(lse, share.shape()),
                           .rope = &rope},
                          with, ssmax::Causal{});
  };
  std::visit(attend_with, scaling);
  share.gather(heads);
}

void attend_backward(const HeadShape& shape, const ScalingGradient& scaling, const ssmax::Rope<float>& rope,
                     Matrix& qkv, Matrix& heads, Matrix& lse, Matrix& dheads, Matrix& dqkv) {
  const Share share(shape);
  dqkv.resize(qkv.rows(), qkv.cols());
  const auto attend_with = [&](const auto& with) {
    ssmax::mpi::attention_backward(ranks(), share.layout(),
                                   {.q = share.of(qkv),
                                    .k = share.of(qkv, shape.width()),
                                    .v = share.of(qkv, 2 * shape.width()),
                                    .out = share.of(heads),
                                    .lse = lse_view(lse, share.shape()),
                                    .rope = &rope},
                                   {.dout = share.of(dheads),
                                    .dq = share.of(dqkv),
                                    .dk = share.of(dqkv, shape.width()),
                                    .dv = share.of(dqkv, 2 * shape.width())},
                                   with, ssmax::Causal{});
  };
  std::visit(attend_with, scaling);
  share.gather(dqkv);
}

}  // namespace longcontext
