// What every unit of this binary offers: the numbers of the same calls.
#pragma once

#include <vector>

std::vector<float> numbers_one();
std::vector<float> numbers_two();
std::vector<float> numbers_headers();
