// Replaces a softmax on Eigen by the library's functors. The functors accept matrices, blocks, maps and
// expressions.
#include <Eigen/Dense>
#include <cmath>
#include <cstdio>
#include <ssmax/eigen.hpp>
#include <string>
#include <vector>

#include "check.hpp"

namespace {

// A usual softmax on Eigen: returns one probability vector per row.
Eigen::MatrixXf softmax(const Eigen::MatrixXf& logits) {
  const Eigen::ArrayXXf e = (logits.colwise() - logits.rowwise().maxCoeff()).array().exp();
  return e.colwise() / e.rowwise().sum();
}

double difference(const Eigen::MatrixXf& a, const Eigen::MatrixXf& b) {
  return static_cast<double>((a - b).cwiseAbs().maxCoeff());
}

}  // namespace

int main() {
  constexpr Eigen::Index kQueries = 50, kKeys = 300, kWidth = 16;
  std::srand(1);  // Eigen's Random uses rand()
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(kQueries, kWidth);
  const Eigen::MatrixXf k = Eigen::MatrixXf::Random(kKeys, kWidth);
  const Eigen::MatrixXf logits = 4 * q * k.transpose();

  const ssmax::Softmax plain;
  const ssmax::SSMax<float> scalable{0.43f};
  const auto c = static_cast<float>(0.43 * std::log(static_cast<double>(kKeys)));

  examples::Check check;
  const auto same = [&](const std::string& what, const Eigen::MatrixXf& ours,
                        const Eigen::MatrixXf& expected) {
    std::printf("%-38s largest difference %.1e\n", what.c_str(), difference(ours, expected));
    check.holds(what, difference(ours, expected) < 2e-6);
  };

  const Eigen::MatrixXf p = scalable(logits);  // before: softmax(logits)
  same("a matrix", p, softmax(c * logits));
  same("an expression", plain(4 * q * k.transpose()), softmax(logits));
  same("columns", plain(logits, ssmax::Axis::columns), softmax(logits.transpose()).transpose());

  Eigen::MatrixXf in_place = logits;
  scalable(in_place, in_place);
  same("in place", in_place, p);

  Eigen::MatrixXf whole = logits;
  plain(logits.topRows(10), whole.topRows(10));
  same("a block of rows", whole.topRows(10), softmax(logits.topRows(10)));
  same("and nothing beside it", whole.bottomRows(kQueries - 10), logits.bottomRows(kQueries - 10));

  std::vector<float> memory(static_cast<std::size_t>(kKeys), -2.0f);
  memory.back() = 3.0f;
  Eigen::Map<Eigen::RowVectorXf> row(memory.data(), kKeys);
  same("a map of foreign memory", scalable(row), softmax(c * row));
  return check.exit_code();
}
