// This target's rows of the leaf table. Included once per target, after the kernels.

template <class S>
inline constexpr Leaves<typename S::Value> leaves_of{
    .width = static_cast<int>(S::width),
    .max = row_max<S>,
    .min_unmasked = row_min_unmasked<S>,
    .exp_store = row_exp_store<S>,
    .exp_sum = row_exp_sum<S>,
    .multiply = row_multiply<S>,
    .affine = row_affine<S>,
    .short_rows = group_rows<S>,
    .packed_rows = packed_rows<S>,
    .dot = row_dot<S>,
    .sum_unmasked = row_sum_unmasked<S>,
    .backward = row_backward<S>,
    .log_backward = row_log_backward<S>,
    .rotate_half_split = rotate_half_split<S>,
    .rotate_interleaved = rotate_interleaved<S>,
    .multiply_add = multiply_add<S>,
};

inline constexpr Conversions conversions{
    .widen_half = widen<F32, half>,
    .widen_bfloat16 = widen<F32, bfloat16>,
    .narrow_half = narrow<F32, half>,
    .narrow_bfloat16 = narrow<F32, bfloat16>,
};
