-- usage: lua harness.lua CASES: a Lua file that returns { module = path, cases = {...} }, where a
-- case has job, parts, uid, and for a modification also record. Prints one JSON object for each.
local input = dofile(arg[1])
local said
slurm = {
  SUCCESS = 0, ERROR = -1, ESLURM_ACCESS_DENIED = 2002, NO_VAL = 4294967294, NO_VAL16 = 65534,
  log_user = function(...) said[#said + 1] = string.format(...) end,
  log_info = function(...) said[#said + 1] = "log: " .. string.format(...) end,
}

local function json(value)
  if type(value) == "table" then
    local parts = {}
    if #value > 0 or next(value) == nil then
      for index, each in ipairs(value) do parts[index] = json(each) end
      return "[" .. table.concat(parts, ",") .. "]"
    end
    for key, each in pairs(value) do parts[#parts + 1] = json(key) .. ":" .. json(each) end
    return "{" .. table.concat(parts, ",") .. "}"
  elseif type(value) == "string" then
    return '"' .. value:gsub('[%c"\\\127-\255]', function(c) return ("\\u%04x"):format(c:byte()) end) .. '"'
  end
  return type(value) == "number" and ("%.0f"):format(value) or tostring(value)
end

local plexrl = dofile(input.module)
-- A job whose every field is a fault.
local function strict(fields)
  if fields.broken then
    return setmetatable({}, { __index = function(_, key) error("no field " .. key) end })
  end
  return fields
end
for _, case in ipairs(input.cases) do
  said = {}
  local code
  if case.record then
    code = plexrl.modify(strict(case.job), case.record, {}, case.uid)
  else
    code = plexrl.submit(strict(case.job), case.parts, case.uid)
  end
  print(json({ code = code, said = said, job = case.job }))
end
