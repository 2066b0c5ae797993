/* Replays inputs of the fuzz target `capi`: sequence_replay FILE... */
#define FUZZ
#include "sequence.c"

int main(int argc, char **argv)
{
	static uint8_t bytes[1 << 16];
	for (int i = 1; i < argc; i++) {
		FILE *file = fopen(argv[i], "rb");
		CHECK(file);
		size_t length = fread(bytes, 1, sizeof bytes, file);
		CHECK(!ferror(file) && feof(file));
		fclose(file);
		fuzz_sequence(bytes, length);
	}
	CHECK(argc > 1 && made > 0);
	CHECK(ibv_close_device(context) == 0);
	return 0;
}
