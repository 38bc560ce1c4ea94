// Catch2 2.13 or 3.x, whichever the distribution ships.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#ifdef CATCH_CONFIG_RUNNER
namespace Catch {
using EventListenerBase = TestEventListenerBase;
}
#endif
#endif
