# A first cut: build.
build:
	cmake -S native -B build/native -G Ninja -DDLFS_TESTS=OFF && cmake --build build/native -j2
	cp build/native/libdlfs.so dlfs/_native/libdlfs.so.new && mv dlfs/_native/libdlfs.so.new dlfs/_native/libdlfs.so
.PHONY: build
