// Everything but the adaptors that need another library: for Eigen, include <ssmax/eigen.hpp> as well.
#pragma once

#include "attention.hpp"
#include "attention_backward.hpp"
#include "config.hpp"
#include "cross_entropy.hpp"
#include "execution.hpp"
#include "half.hpp"
#include "kv_cache.hpp"
#include "mask.hpp"
#include "online_softmax.hpp"
#include "rope.hpp"
#include "scaling.hpp"
#include "score.hpp"
#include "softmax.hpp"
#include "target.hpp"
#include "view.hpp"
#include "workspace.hpp"
