// docs/layouts.md shows these calls: attention on Eigen's matrices, RowMajor [tokens, channels] and ColMajor
// [channels, tokens].
#include <Eigen/Dense>
#include <cstdlib>
#include <ssmax/eigen.hpp>
#include <ssmax/ssmax.hpp>

#include "check.hpp"

using namespace ssmax;

using RowMajorMatrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// qkv [tokens, (heads + 2·kv_heads)·d], RowMajor. Returns [tokens, heads·d].
RowMajorMatrix row_major(const RowMajorMatrix& qkv, index_t heads, index_t kv_heads) {
  const auto [q, k, v] = qkv_views(qkv, heads, kv_heads);
  RowMajorMatrix out(qkv.rows(), heads * q.extent(3));
  attention({.q = q, .k = k, .v = v, .out = heads_view(out, heads)}, SSMax<float>{0.43f}, Causal{});
  return out;
}

// qkv [(heads + 2·kv_heads)·d, tokens], ColMajor, Eigen's default. Returns [heads·d, tokens].
Eigen::MatrixXf column_major(const Eigen::MatrixXf& qkv, index_t heads, index_t kv_heads) {
  const auto [q, k, v] = qkv_views(column_view(qkv), heads, kv_heads);
  Eigen::MatrixXf out(heads * q.extent(3), qkv.cols());
  attention({.q = q, .k = k, .v = v, .out = heads_view(column_view(out), heads)}, SSMax<float>{0.43f},
            Causal{});
  return out;
}

int main() {
  std::srand(1);  // Eigen's Random draws from rand()
  constexpr index_t kHeads = 4, kKvHeads = 2, kTokens = 30, kWidth = 8;
  const RowMajorMatrix rows = RowMajorMatrix::Random(kTokens, (kHeads + 2 * kKvHeads) * kWidth);
  const Eigen::MatrixXf columns = rows.transpose();
  examples::Check check;
  check.holds("both orders give one result",
              row_major(rows, kHeads, kKvHeads) == column_major(columns, kHeads, kKvHeads).transpose());
  return check.exit_code();
}
