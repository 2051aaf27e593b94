"""Messages of the package pluginregistration; typed by the stub of the same name."""

from drastate.drivers._pb.pool import message

_PACKAGE = "pluginregistration"

InfoRequest = message(f"{_PACKAGE}.InfoRequest")
PluginInfo = message(f"{_PACKAGE}.PluginInfo")
RegistrationStatus = message(f"{_PACKAGE}.RegistrationStatus")
RegistrationStatusResponse = message(f"{_PACKAGE}.RegistrationStatusResponse")
