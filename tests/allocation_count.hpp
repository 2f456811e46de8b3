// How often this program has called operator new so far, in all threads, and for how many bytes.
#pragma once

long allocation_count();
long long allocated_bytes();
