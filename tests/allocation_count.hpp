// How often this program has called operator new so far, in all threads.
#pragma once

long allocation_count();
