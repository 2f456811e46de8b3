// The mistakes of calls: the first three lines name the cause and the type, and show the line of the call.
//
// lines 3
// case DOUBLE_TENSORS: write_attention_double_for_tensors_of_double<double, float>
// case DOUBLE_POINTER: write_attention_double_for_tensors_of_double<double, float>
// case DOUBLE_SOURCE: the_source_is_not_computed_in_A_write_attention_double
// case MASK_FOR_BIND: the_plan_has_the_mask|the plan has the mask
// case MASK_FOR_RUN: run_takes_a_scaling_a_score_and_an_executor_the_plan_has_the_mask|the plan has the mask
// case POOL_FOR_PLAN: pass a mask; bind and run
// case TWO_MASKS_FOR_PLAN: pass a mask; bind and run
// case TWO_MASKS_FOR_BACKWARD_PLAN: join masks with &
// case POOL_FOR_BACKWARD_PLAN: a mask with .keys.
// case POOL_IN_BRACES: policies_have_no_braces|policies have no braces
// case OPTIONS_IN_BRACES: options_are_members_of_the_arguments|options are members of the arguments
// case NO_POLICY: is_no_scaling_mask_score_or_executor<Nothing>|a policy is a scaling, a mask with .keys.
// case TWO_MASKS: has_two_masks_join_them_with_the_operator_and|join masks with &
// case TWO_SCALINGS: has_two_scalings|each kind at most once
// case MASK_WITHOUT_KEYS: a_mask_needs_the_member_keys<Seen>|a mask with .keys.
// case SCORE_WITHOUT_DERIVATIVE: a_score_needs_the_member_derivative<Twice>|a score with .derivative.
// case POLICY_OF_TWO_KINDS: write_as_mask<Scaled>|as_mask.x.
// case FLOAT_SLOPES: slopes_are_double|slopes are double
// case TEMPORARY_CACHE: a_temporary_owns_its_keys_give_the_cache_a_name
// case Q8_0_IN_VIEWS: views_do_not_take_this_storage_type_store_it_in_a_source_of_keys
// case STORAGE_TYPE_FOR_COMPUTE_TYPE: the_compute_type_is_float_or_double|the compute type is float or double
// case CONST_OUTPUT: an_output_must_not_be_const
// case VECTOR: a_vector_has_no_extents_write_data_and_extents
// case RANK_3: a_tensor_has_rank_4_batch_heads_positions_channels
#include <ssmax/ssmax.hpp>
#include <vector>

using namespace ssmax;

struct Nothing {};
struct Seen {
  bool sees(const Query&, index_t) const { return true; }
};
struct Twice {
  template <class Z>
  Z operator()(Z z, const Key&) const {
    return 2 * z;
  }
};
struct Scaled : Causal {
  double operator()(const Row&) const { return 1; }
};

int main() {
  std::vector<float> memory(64), slopes(2);
  std::vector<double> doubles(64);
  const View<float, 4> x(memory.data(), {1, 1, 4, 4});
  const View<const float, 4> in = x;
  const View<double, 4> d(doubles.data(), {1, 1, 4, 4});
  const Rope<float> rope({.width = 4}, 4);
  ThreadPool pool(1);
  const Plan plan({.q = x, .k = x, .v = x}, 1, Causal{});

  attention({.q = x, .k = x, .v = x, .out = x, .rope = &rope}, pool, as_mask(Scaled{}), SSMax<float>{1.f});
  attention<double>({.q = d, .k = d, .v = d, .out = d});
#if defined(DOUBLE_TENSORS)
  attention({.q = d, .k = x, .v = x, .out = x});
#elif defined(DOUBLE_POINTER)
  attention({.q = {doubles.data(), {1, 1, 4, 4}}, .k = x, .v = x, .out = x});
#elif defined(DOUBLE_SOURCE)
  const KvCache<double> cache({.width = 4, .capacity = 4});
  attention({.q = x, .keys = cache, .out = x}, Causal{});
#elif defined(MASK_FOR_BIND)
  plan.bind({.q = x, .k = x, .v = x, .out = x}, Causal{});
#elif defined(MASK_FOR_RUN)
  plan.run({.q = x, .k = x, .v = x, .out = x}, {}, Causal{});
#elif defined(POOL_FOR_PLAN)
  const Plan of_pool({.q = x, .k = x, .v = x}, 1, pool);
#elif defined(TWO_MASKS_FOR_PLAN)
  const Plan of_two({.q = x, .k = x, .v = x}, 1, Causal{}, SlidingWindow{3});
#elif defined(TWO_MASKS_FOR_BACKWARD_PLAN)
  const BackwardPlan of_two({.q = x, .k = x, .v = x, .out = x}, {.dout = x}, 1, Causal{}, SlidingWindow{3});
#elif defined(POOL_FOR_BACKWARD_PLAN)
  const BackwardPlan of_pool({.q = x, .k = x, .v = x, .out = x}, {.dout = x}, 1, Causal{}, pool);
#elif defined(POOL_IN_BRACES)
  attention({.q = x, .k = x, .v = x, .out = x}, Causal{}, {pool});
#elif defined(OPTIONS_IN_BRACES)
  attention({.q = x, .k = x, .v = x, .out = x}, Causal{}, {.rope = &rope}, pool);
#elif defined(NO_POLICY)
  attention({.q = x, .k = x, .v = x, .out = x}, Causal{}, Nothing{});
#elif defined(TWO_MASKS)
  attention({.q = x, .k = x, .v = x, .out = x}, Causal{}, Softmax{}, SlidingWindow{3});
#elif defined(TWO_SCALINGS)
  attention({.q = x, .k = x, .v = x, .out = x}, LogN{}, Causal{}, Softmax{});
#elif defined(MASK_WITHOUT_KEYS)
  attention({.q = x, .k = x, .v = x, .out = x}, Seen{});
#elif defined(SCORE_WITHOUT_DERIVATIVE)
  attention_backward({.q = x, .k = x, .v = x, .out = x}, {.dout = x}, Causal{}, Twice{});
#elif defined(POLICY_OF_TWO_KINDS)
  attention({.q = x, .k = x, .v = x, .out = x}, Scaled{});
#elif defined(FLOAT_SLOPES)
  attention({.q = x, .k = x, .v = x, .out = x}, Alibi{slopes});
#elif defined(TEMPORARY_CACHE)
  attention({.q = x, .keys = KvCache<float>({.width = 4, .capacity = 4}), .out = x}, Causal{});
#elif defined(Q8_0_IN_VIEWS)
  attention({.q = x, .k = View<const Q8_0, 4>{}, .v = x, .out = x}, Causal{});
#elif defined(STORAGE_TYPE_FOR_COMPUTE_TYPE)
  attention<half>({.q = x, .k = x, .v = x, .out = x}, Causal{});
#elif defined(CONST_OUTPUT)
  attention({.q = x, .k = x, .v = x, .out = in}, Causal{});
#elif defined(VECTOR)
  attention({.q = memory, .k = x, .v = x, .out = x});
#elif defined(RANK_3)
  attention({.q = View<const float, 3>{}, .k = x, .v = x, .out = x});
#endif
}
