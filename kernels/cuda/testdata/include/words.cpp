// Two threads on a processor: one writes rows and says so, the other waits for them, changes them and says so; the
// first waits for that. Words by expert and by tile. Under a race detector an order that is missing is a report.
#include "switchyard_device.cuh"

#include <cstdio>
#include <thread>
#include <vector>

int main()
{
	constexpr uint32_t tiles = 8, rows = 64, rounds = 20;
	static const int32_t expert_of[tiles] = {0, 0, 0, 1, 2, 2, 3, 3};
	for (uint32_t round = 0; round < rounds; round++)
		for (const int32_t *word_of : {expert_of, static_cast<const int32_t *>(nullptr)}) {
			std::vector<uint32_t> have(tiles), want(tiles, ~0u), ready(tiles), wanted(tiles),
			    x(tiles * rows);
			for (uint32_t t = 0; t < tiles; t++)
				wanted[word_of == nullptr ? t : expert_of[t]] += rows;
			switchyard::words landed{have.data(), want.data(), word_of};
			if (switchyard::rows_landed(landed, 0) || switchyard::wait_rows(landed, 0, 1)) {
				std::puts("rows are there before anybody has written them");
				return 1;
			}
			bool good = true, partners = true;
			std::thread partner([&] {
				for (uint32_t t = 0; t < tiles; t++) {
					partners &= switchyard::wait_rows(landed, t);
					for (uint32_t r = t * rows; r < (t + 1) * rows; r++)
						x[r] = 2 * x[r] + 1;
					switchyard::rows_done(ready.data(), word_of, t, rows);
				}
			});
			for (uint32_t w = 0; w < tiles; w++)
				__atomic_store_n(&want[w], wanted[w], __ATOMIC_RELEASE);
			for (uint32_t t = 0; t < tiles; t++) {
				for (uint32_t r = t * rows; r < (t + 1) * rows; r++)
					x[r] = r;
				switchyard::rows_done(have.data(), word_of, t, rows);
			}
			switchyard::words back{ready.data(), wanted.data(), word_of};
			for (uint32_t t = 0; t < tiles; t++) {
				good &= switchyard::wait_rows(back, t);
				for (uint32_t r = t * rows; r < (t + 1) * rows; r++)
					good &= x[r] == 2 * r + 1;
			}
			partner.join();
			if (!good || !partners) {
				std::printf("round %u: rows are wrong\n", round);
				return 1;
			}
		}
	if (switchyard::free_multiprocessors(132, 0) != 36 || switchyard::free_multiprocessors(132, 24) != 108 ||
	    switchyard::free_multiprocessors(8, 24) != 0) {
		std::puts("free multiprocessors");
		return 1;
	}
	return 0;
}
